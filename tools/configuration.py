"""`python -m tools.configuration`: writes docs/configuration.md, every key of a deployment file, from its declaration.

The values and defaults come from the fields of `ServingConfig`, groups and meanings from the comments in its source.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.core.declarations import allowed_values
from orchestrator.core.deployment.config import ServingConfig

PAGE = Path(__file__).resolve().parent.parent / "docs/configuration.md"
_GROUP, _MEANING = re.compile(r"    # (.+)"), re.compile(r"    #: (.+)")
_FIELD = re.compile(r"    (\w+): ")
#: A page, and if named its section, as the comments of the source refer to them.
_REFERENCE = re.compile(r"docs/((?:\w[\w-]*/)*)([\w-]+)\.md(?:, (\w[\w ]*\w))?")
_HEAD = """\
# Configuration

Every key of a deployment file such as `serving.toml`. This page is made by `make configuration` from the comments and
fields of `ServingConfig` in `orchestrator/core/deployment/config.py`: change them there.

`SERVING_<KEY>` in the environment overrides a key of the file, which overrides the default
([protocol](protocol.md#servingtoml)). A running server takes a changed file with a
[reload](operations.md#reload).
Ports, the log level and the time limits of starting and stopping are not keys: they are environment variables of the
launcher ([operations](operations.md#start-and-stop)).
"""
_TABLE = "\n## {group}\n\n| key | values | default | meaning |\n|---|---|---|---|\n{rows}\n"


class Key(NamedTuple):
    """A key of the deployment file, as the source of its declaration describes it."""

    group: str
    name: str
    meaning: str


def read_keys(source: str, names: Collection[str]) -> Iterator[Key]:
    """Yield the keys with these names in the source of a class, in its order."""
    group, meaning = "", list[str]()
    for line in source.splitlines():
        if found := _GROUP.fullmatch(line):
            group = found[1]
        elif found := _MEANING.fullmatch(line):
            meaning.append(found[1])
        elif (found := _FIELD.match(line)) and found[1] in names:
            yield Key(group, found[1], " ".join(meaning))
            meaning = []


def linked(text: str) -> str:
    """Return a text whose references to pages are links from docs/."""

    def link(found: re.Match[str]) -> str:
        folder, page, section = found.groups()
        if section is None:
            return f"[{page}]({folder}{page}.md)"
        return f"[{page}, {section}]({folder}{page}.md#{section.lower().replace(' ', '-')})"

    return _REFERENCE.sub(link, text)


def row(key: Key) -> str:
    """Return the table row of a key."""
    field = ServingConfig.model_fields[key.name]
    default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
    return f"| `{key.name}` | {allowed_values(field)} | {default} | {linked(key.meaning)} |"


def page_of(keys: Iterable[Key]) -> str:
    """Return the page: a table for each group of keys."""
    groups = itertools.groupby(keys, lambda key: key.group)
    tables = (_TABLE.format(group=group, rows="\n".join(map(row, members))) for group, members in groups)
    return _HEAD + "".join(tables)


def declared_keys() -> list[Key]:
    """Return the keys of the deployment file."""
    return list(read_keys(inspect.getsource(ServingConfig), ServingConfig.model_fields))


if __name__ == "__main__":
    PAGE.write_text(page_of(declared_keys()), encoding="utf-8")
