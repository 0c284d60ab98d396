"""The LLM API behind a real Triton server, over a stand-in of the library (tests/standin).

The texts are compared with those of our own engine in float64. Nothing here runs the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from build.trtllm.llm_api import LlmApiSpec, write_folder
from launcher.server import Server
from orchestrator.core.drafting import Limits
from orchestrator.core.sampling_params import Sampling
from orchestrator.proposers.none import NoProposer
from tests.server.conftest import repository, serving
from tests.support.clients import Stream, ask, ask_unary, metric, until
from tests.support.decode import decode
from tests.support.engines import EngineTarget, make_paged, start_target
from tests.support.executor_journal import ExecutorJournal

pytestmark = pytest.mark.server

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 24
ASKED: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": NUM_TOKENS, "end_id": -1}
INSIDE = ("eagle3", "mtp", "prompt_lookup", "draft_model")


@contextmanager
def hosting(folder: Path, *lines: str) -> Iterator[Server]:
    """Serve the folder `target` by the real models, with the stand-in where the library would be."""
    (folder / "serving.toml").write_text("\n".join(('target = "target"', "kv_memory_mb = 8", *lines)))
    models = repository(folder, "speculative", "speculative_unary", target="standin.py")
    with serving(folder / "serving.toml", repository=models, env={"STANDIN_FOLDER": str(folder)}) as server:
        yield server


def own_text(checkpoints: Path, prompt: list[int], sampling: Sampling = Sampling()) -> list[int]:  # noqa: B008
    engine = start_target(make_paged(checkpoints / "target"))
    text, _ = decode(EngineTarget(engine, 1), NoProposer(), prompt, sampling, Limits(NUM_TOKENS, 200, 64))
    engine.close()
    return text


def eight_texts(server: Server, checkpoints: Path, **inputs: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Ask eight things at once; return what came, and what our own engine says."""
    prompts = [[n + 1, n + 2, n + 1, n + 2, 3] for n in range(8)]
    with Stream(server.grpc_url) as stream:
        names = [str(n) for n in range(8)]
        for name, prompt in zip(names, prompts, strict=True):
            stream.send(name, **{**ASKED, "input_ids": prompt, **inputs})
        answers = stream.answers(*names)
    return [answers[name].ids for name in names], [own_text(checkpoints, prompt) for prompt in prompts]


# The LLM API


@pytest.fixture(scope="module", params=INSIDE)
def llm(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str, Path]]:
    folder, method = tmp_path_factory.mktemp(request.param), request.param
    drafter = str(checkpoints / "draft") if method in ("eagle3", "draft_model") else ""
    spec = LlmApiSpec(method=method, target=str(checkpoints / "target"), drafter=drafter, max_seq_len=256)
    (folder / "target").mkdir()
    write_folder(spec, folder / "target")
    with hosting(folder, 'engine = "llm_api"', f'default_speculation = "{method}"') as server:
        yield server, method, folder


def test_llm_api_gives_the_torch_engine_s_text(llm: tuple[Server, str, Path], checkpoints: Path) -> None:
    server, method, _ = llm
    truth = own_text(checkpoints, PROMPT)
    for asked in ({}, {"speculation": method}, {"speculation": "none"}):
        answer = ask(server.grpc_url, return_stats=True, **asked, **ASKED)
        assert answer.ids == truth
        assert (answer.last["total_accepted_draft_tokens"] > 0) == (asked.get("speculation") != "none")
    assert ask_unary(server.grpc_url, **ASKED)["output_ids"] == truth


def test_llm_api_streams_eight_at_once(llm: tuple[Server, str, Path], checkpoints: Path) -> None:
    found, expected = eight_texts(llm[0], checkpoints, stream=True)
    assert found == expected


def test_llm_api_says_what_it_does_not_serve(llm: tuple[Server, str, Path]) -> None:
    server, method, _ = llm
    assert (
        f"it drafts by itself, with the method '{method}'" in ask(server.grpc_url, speculation="suffix", **ASKED).error
    )
    assert "temperature: it is not established" in ask(server.grpc_url, temperature=1.0, **ASKED).error


def test_cancelled_request_leaves_the_llm_api(llm: tuple[Server, str, Path]) -> None:
    """A cancel is noticed between steps: one that came while the next was waited for is noticed behind that."""
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
