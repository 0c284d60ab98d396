"""The LLM API behind a real Triton server, over the stand-in of trtllm-serve; nothing here runs the library.

The texts are compared with those of our own engine in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("smg_grpc_proto")

from build.trtllm.llm_api import LlmApiSpec, write_folder
from launcher.server import Server
from tests.server.conftest import serving
from tests.standin.trtllm_serve import TrtllmServe
from tests.support.clients import Stream, ask, ask_unary, metric, until
from tests.support.engines import own_text

pytestmark = pytest.mark.server

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 24
ASKED: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": NUM_TOKENS, "end_id": -1}


@pytest.fixture(scope="module", params=("eagle3", "dflash"))
def llm(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, str, TrtllmServe]]:
    folder, method = tmp_path_factory.mktemp(request.param), request.param
    spec = LlmApiSpec(
        method=method, target=str(checkpoints / "target"), drafter=str(checkpoints / "draft"), max_seq_len=256
    )
    (folder / "target").mkdir()
    engine = TrtllmServe(write_folder(spec, folder / "target").command, folder / "target")
    lines = ('target = "target"', "kv_memory_mb = 8", 'engine = "llm_api"', f'default_speculation = "{method}"')
    (folder / "serving.toml").write_text("\n".join(lines))
    with (
        engine.listening() as address,
        serving(folder / "serving.toml", env={"SERVING_LLM_API_ADDRESS": address}) as server,
    ):
        yield server, method, engine


def test_llm_api_gives_the_torch_engine_s_text(llm: tuple[Server, str, TrtllmServe], checkpoints: Path) -> None:
    server, method, _ = llm
    truth = own_text(checkpoints / "target", PROMPT, NUM_TOKENS)
    for asked in ({}, {"speculation": method}, {"speculation": "none"}):
        answer = ask(server.grpc_url, return_stats=True, **asked, **ASKED)
        assert answer.ids == truth
        assert (answer.last["total_accepted_draft_tokens"] > 0) == (asked.get("speculation") != "none")
    assert ask_unary(server.grpc_url, **ASKED)["output_ids"] == truth


def test_llm_api_streams_eight_at_once(llm: tuple[Server, str, TrtllmServe], checkpoints: Path) -> None:
    prompts = {str(n): [n + 1, n + 2, n + 1, n + 2, 3] for n in range(8)}
    with Stream(llm[0].grpc_url) as stream:
        for name, prompt in prompts.items():
            stream.send(name, **{**ASKED, "input_ids": prompt, "stream": True})
        answers = stream.answers(*prompts)
    for name, prompt in prompts.items():
        assert answers[name].ids == own_text(checkpoints / "target", prompt, NUM_TOKENS)


def test_llm_api_says_what_it_does_not_serve(llm: tuple[Server, str, TrtllmServe]) -> None:
    server, method, _ = llm
    refused = ask(server.grpc_url, speculation="suffix", **ASKED).error
    assert f"it drafts by itself, with the method '{method}'" in refused
    assert "temperature: trtllm-serve drafts for greedy" in ask(server.grpc_url, temperature=1.0, **ASKED).error
    assert "does not hand it on" in ask(server.grpc_url, cache_salt="mine", **ASKED).error


def test_cancelled_request_leaves_the_llm_api(llm: tuple[Server, str, TrtllmServe]) -> None:
    """A cancellation is noticed between steps; one that comes while a step is awaited is noticed after that step."""
    server, _, engine = llm
    engine.passes = 2
    with Stream(server.grpc_url) as stream:
        stream.send("r", **{**ASKED, "max_tokens": 200, "stream": True})
        assert stream.receive().values
        stream.cancel()
        engine.passes += 1
        until(lambda: engine.aborted, "the abort of the generation")
    engine.passes = float("inf")
    until(lambda: metric(server.metrics_url, "spec_sequences", model="target") == 0, "an end of the sequence")
