"""A preloaded corpus on the real server: built by its command and drafted from, while the text stays the target's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.deployment import CONFIG, ROOT, serving
from benchmarks.traffic import mixed_prompts
from launcher import Server, StartError
from tests.support.clients import Answer, ask

pytestmark = pytest.mark.server

PROMPTS = [prompt.text for prompt in mixed_prompts(4)]
LIMITS: dict[str, Any] = {"max_tokens": 48, "end_id": -1, "return_stats": True}
SOURCES = {"suffix": "suffix.corpus", "ngram": "ngram", "auto": "corpus"}


def said(server: Server, method: str, prompt: str) -> Answer:
    answer = ask(server.grpc_url, stream=True, text_input=prompt, speculation=method, **LIMITS)
    assert not answer.error
    return answer


@pytest.fixture(scope="module")
def told(shipped: Server) -> dict[str, Answer]:
    """The answers without drafts, from a server without a corpus."""
    return {prompt: said(shipped, "none", prompt) for prompt in PROMPTS}


@pytest.fixture(scope="module")
def server(told: dict[str, Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve with a corpus of the first two texts."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts.txt").write_text("".join(f"{prompt}{told[prompt].text}\n" for prompt in PROMPTS[:2]))
    options = ["--config", str(CONFIG), "--out", str(folder / "index"), str(folder / "texts.txt")]
    subprocess.run(
        [sys.executable, "-m", "build.corpus_index", *options], cwd=ROOT, check=True, timeout=120, capture_output=True
    )
    with serving("float32", SERVING_CORPUS_INDEX=str(folder / "index")) as running:
        yield running


@pytest.mark.parametrize("method", SOURCES)
@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_text_with_a_corpus_is_the_targets_own(
    server: Server, told: dict[str, Answer], method: str, number: int
) -> None:
    answer = said(server, method, PROMPTS[number])
    assert answer.ids == told[PROMPTS[number]].ids


@pytest.mark.parametrize("method", SOURCES)
def test_a_text_of_the_corpus_is_drafted_from_it(server: Server, told: dict[str, Answer], method: str) -> None:
    stats = said(server, method, PROMPTS[0]).stats
    accepted = [each["num_accepted"] for name, each in stats["sources"].items() if SOURCES[method] in name.split("+")]
    assert sum(accepted) > 0
    assert stats["num_steps"] < len(told[PROMPTS[0]].ids)


def test_a_folder_that_holds_no_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="corpus_index"), serving("float32", SERVING_CORPUS_INDEX=str(tmp_path)):
        pass
