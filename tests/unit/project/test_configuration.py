"""docs/configuration.md is what its declaration says, and each reference in it leads to a section."""

from __future__ import annotations

import re

import pytest

from orchestrator.core.deployment.config import ServingConfig
from tools.configuration import PAGE, Key, declared_keys, page_of, read_keys

pytestmark = pytest.mark.unit

SOURCE = """
class ServingConfig:
    # Models
    #: the model
    #: that is served
    target: str
    draft: str = ""
    # Requests
    #: how many
    max_running: int = Field(32)
    other: int = 3
"""


def test_the_page_is_what_the_declaration_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_of(declared_keys()), "make configuration writes it anew"


def test_every_key_has_a_group_and_a_meaning() -> None:
    keys = declared_keys()
    assert [key.name for key in keys] == list(ServingConfig.model_fields)
    assert [key.name for key in keys if not (key.group and key.meaning)] == []


def test_links_lead_to_pages_and_their_sections() -> None:
    for page, anchor in re.findall(r"\]\(([\w/-]+\.md)(?:#([\w-]+))?\)", PAGE.read_text(encoding="utf-8")):
        headings = re.findall(r"^#+ (.*)", (PAGE.parent / page).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{page}#{anchor}"


def test_keys_are_read_with_their_group_and_the_comments_above_them() -> None:
    assert list(read_keys(SOURCE, ("target", "draft", "max_running"))) == [
        Key("Models", "target", "the model that is served"),
        Key("Models", "draft", ""),
        Key("Requests", "max_running", "how many"),
    ]
