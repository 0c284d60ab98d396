"""The LLM API behind a real Triton server, over a stand-in for the library (tests/standin).

The texts are compared with those of our own engine in float64. Nothing here runs the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from build.trtllm.llm_api import LlmApiSpec, write_folder
from launcher.server import Server
from tests.server.conftest import repository, serving
from tests.support.clients import Stream, ask, ask_unary, metric, until
from tests.support.engines import own_text
from tests.support.executor_journal import ExecutorJournal

pytestmark = pytest.mark.server

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 24
ASKED: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": NUM_TOKENS, "end_id": -1}
INSIDE = ("eagle3", "mtp", "prompt_lookup", "draft_model")


@pytest.fixture(scope="module", params=INSIDE)
def llm(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str, Path]]:
    folder, method = tmp_path_factory.mktemp(request.param), request.param
    drafter = str(checkpoints / "draft") if method in ("eagle3", "draft_model") else ""
    spec = LlmApiSpec(method=method, target=str(checkpoints / "target"), drafter=drafter, max_seq_len=256)
    (folder / "target").mkdir()
    write_folder(spec, folder / "target")
    lines = ('target = "target"', "kv_memory_mb = 8", 'engine = "llm_api"', f'default_speculation = "{method}"')
    (folder / "serving.toml").write_text("\n".join(lines))
    models = repository(folder, "speculative", "speculative_unary", target="standin.py")
    with serving(folder / "serving.toml", repository=models, env={"STANDIN_FOLDER": str(folder)}) as server:
        yield server, method, folder


def test_llm_api_gives_the_torch_engine_s_text(llm: tuple[Server, str, Path], checkpoints: Path) -> None:
    server, method, _ = llm
    truth = own_text(checkpoints / "target", PROMPT, NUM_TOKENS)
    for asked in ({}, {"speculation": method}, {"speculation": "none"}):
        answer = ask(server.grpc_url, return_stats=True, **asked, **ASKED)
        assert answer.ids == truth
        assert (answer.last["total_accepted_draft_tokens"] > 0) == (asked.get("speculation") != "none")
    assert ask_unary(server.grpc_url, **ASKED)["output_ids"] == truth


def test_llm_api_streams_eight_at_once(llm: tuple[Server, str, Path], checkpoints: Path) -> None:
    prompts = {str(n): [n + 1, n + 2, n + 1, n + 2, 3] for n in range(8)}
    with Stream(llm[0].grpc_url) as stream:
        for name, prompt in prompts.items():
            stream.send(name, **{**ASKED, "input_ids": prompt, "stream": True})
        answers = stream.answers(*prompts)
    for name, prompt in prompts.items():
        assert answers[name].ids == own_text(checkpoints / "target", prompt, NUM_TOKENS)


def test_llm_api_says_what_it_does_not_serve(llm: tuple[Server, str, Path]) -> None:
    server, method, _ = llm
    assert (
        f"it drafts by itself, with the method '{method}'" in ask(server.grpc_url, speculation="suffix", **ASKED).error
    )
    assert "temperature: it is not established" in ask(server.grpc_url, temperature=1.0, **ASKED).error


def test_cancelled_request_leaves_the_llm_api(llm: tuple[Server, str, Path]) -> None:
    """A cancellation is noticed between steps; one that comes while a step is awaited is noticed after that step."""
    server, _, folder = llm
    journal = ExecutorJournal(folder, "target")
    with journal.held(), Stream(server.grpc_url) as stream:
        stream.send("r", **{**ASKED, "max_tokens": 200, "stream": True})
        journal.leave()
        assert stream.receive().values
        stream.cancel()

        def aborted() -> list[int]:
            journal.leave()
            return journal.ids("cancelled")

        until(aborted, "the abort of the generation")
    assert journal.ids("cancelled") == journal.ids("enqueued") and len(journal.events("pass")) < 20
    until(lambda: metric(server.metrics_url, "spec_sequences", model="target") == 0, "an end of the sequence")
