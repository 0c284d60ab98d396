"""Our models in front of NVIDIA's backend, in a real Triton; the backend itself is a stand-in (tests/standin)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from build.trtllm.repository import write_repository
from launcher.server import Server
from orchestrator.core.deployment.config import BACKEND_MODELS
from tests.server.conftest import repository, serving
from tests.standin import FOLDER
from tests.standin.engine_folder import make_engine
from tests.support.clients import Answer, Stream, ask, ask_unary, until
from tests.support.engines import own_text
from tests.unit.build.test_trtllm_plan import DRAFT, LLAMA_8B, MEDUSA, planned

pytestmark = pytest.mark.server

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 24
ASKED: dict[str, Any] = {"input_ids": PROMPT, "max_tokens": NUM_TOKENS, "end_id": -1}
METHODS = {"none": {}, "prompt_lookup": {}, "draft_model": {}, "suffix": {"tree": False}, "ngram": {}}


@dataclass(frozen=True)
class Served:
    """A running server, and the folder whose files control its backend."""

    server: Server
    script: Path

    @property
    def url(self) -> str:
        """Its gRPC address."""
        return self.server.grpc_url

    def calls(self, model: str = "tensorrt_llm") -> list[dict[str, Any]]:
        """Return the calls that the backend has received."""
        file = self.script / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [call for call in map(json.loads, lines) if call["model"] == model]


def stand_ins(folder: Path, models: Path, values: dict[str, Any] = DRAFT) -> None:
    """Write the backend's model folders as the builder does, and put the stand-in in the place of the C++ backend."""
    for config in write_repository(planned(values), folder, models):
        text = config.read_text()
        assert text.count('backend: "tensorrtllm"') == 1
        config.write_text(text.replace('backend: "tensorrtllm"', 'backend: "python"'))
        (config.parent / "1/model.py").symlink_to(FOLDER / "tensorrtllm_backend/model.py")


@pytest.fixture(scope="module")
def served_by_all(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("backend")
    target = make_engine(folder / "engines/target", checkpoints / "target")
    draft = make_engine(folder / "engines/draft", checkpoints / "draft", role="draft", mode="", max_draft_len=0)
    models = repository(folder, "target", "draft", "speculative", "speculative_unary")
    stand_ins(folder, models)
    script = folder / "script"
    script.mkdir()
    lines = (f'target = "{target}"', f'draft = "{draft}"', 'engine = "tensorrtllm_backend"', "draft_timeout_ms = 20000")
    (folder / "serving.toml").write_text("\n".join((*lines, "remember_tokens = 1000")))
    environ = {"SCRIPT_FOLDER": str(script)}
    with serving(folder / "serving.toml", repository=models, env=environ, stop_limit_s=5) as running:
        assert set(BACKEND_MODELS.values()) <= set(running.models)
        yield Served(running, script)


@pytest.fixture
def served(served_by_all: Served) -> Iterator[Served]:
    """The server; after a test, even a failed one, the backend neither holds requests nor lies."""
    yield served_by_all
    for order in ("hold", "lie"):
        (served_by_all.script / order).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def truth(checkpoints: Path) -> list[int]:
    """The text of our own engine."""
    return own_text(checkpoints / "target", PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("method", METHODS)
def test_text_is_the_torch_engine_s(served: Served, truth: list[int], method: str) -> None:
    answer = ask(served.url, speculation=method, speculation_config=json.dumps(METHODS[method]), **ASKED)
    assert not answer.error and answer.ids == truth
    assert (answer.last["total_draft_tokens"] > 0) == (method != "none")


def test_draft_model_is_asked_and_its_chain_verified(served: Served, truth: list[int]) -> None:
    before = len(served.calls("tensorrt_llm_draft")), len(served.calls())
    answer = ask(served.url, speculation="draft_model", num_draft_tokens=3, **ASKED)
    assert answer.ids == truth
    assert len(served.calls("tensorrt_llm_draft")) > before[0]
    drafted = [call["tensors"].get("draft_input_ids") for call in served.calls()[before[1] :]]
    assert ["int32", [1, 3]] in drafted


def test_stream_brings_a_step_at_a_time_and_unary_the_whole(served: Served, truth: list[int]) -> None:
    answer = ask(served.url, stream=True, speculation="none", **ASKED)
    assert answer.ids == truth and len(answer.parts) > 2
    assert ask_unary(served.url, speculation="prompt_lookup", **ASKED)["output_ids"] == truth


def test_every_call_has_an_id_of_its_own(served: Served) -> None:
    before = len(served.calls())
    ask(served.url, speculation="none", **{**ASKED, "max_tokens": 6})
    ids = [call["id"] for call in served.calls()[before:]]
    assert len(ids) == 6 and len(set(ids)) == 6 and all(ids)


def test_eight_at_once_are_in_the_backend_together(served: Served, checkpoints: Path) -> None:
    prompts = {str(n): [n + 1, n + 2, n + 1, n + 2, 3] for n in range(8)}
    (served.script / "hold").write_text("8")  # no step is answered before eight are under way
    with Stream(served.url) as stream:
        for name, prompt in prompts.items():
            stream.send(name, speculation="prompt_lookup", **{**ASKED, "input_ids": prompt})
        answers = stream.answers(*prompts)
    for name, prompt in prompts.items():
        assert answers[name].ids == own_text(checkpoints / "target", prompt, NUM_TOKENS)


def test_cancelled_request_asks_no_further_step(served: Served) -> None:
    long = {**ASKED, "max_tokens": 200, "stream": True, "speculation": "none"}
    began, asked = len(served.calls()), -1
    stream = Stream(served.url)
    stream.send("r", **long)
    stream.receive()

    def is_quiet() -> bool:
        nonlocal asked
        before, asked = asked, len(served.calls())
        time.sleep(0.3)
        return len(served.calls()) == asked == before

    stream.cancel()
    until(is_quiet, "an end of the steps")
    # The whole text would take one call per token; a stop is a call, too.
    assert 0 < len(served.calls()) - began < long["max_tokens"]
    assert ask(served.url, speculation="none", **ASKED).last["finish_reason"] == "length"


LIES = {
    "nothing": "has no output_ids",
    "two beams": "not one beam",
    "too long": "is beyond its",
    "no new token": "0 new tokens that",
    "no such token": "a token outside 0..63",
    "excludes the input": "do not begin with the input",
    "fails": "Triton model 'tensorrt_llm' failed: scripted failure",
}


@pytest.mark.parametrize("lie", LIES)
def test_invalid_answer_gives_a_one_line_error_and_the_next_is_served(
    served: Served, truth: list[int], lie: str
) -> None:
    tell(served, lie)
    answer = ask(served.url, speculation="none", **ASKED)
    tell(served, "")
    assert LIES[lie] in answer.error and "\n" not in answer.error
    assert ask(served.url, speculation="none", **ASKED).ids == truth


def tell(served: Served, lie: str) -> None:
    """Have the backend give this false answer from now on; "": true answers."""
    fresh = served.script / "new"
    fresh.write_text(lie)
    fresh.rename(served.script / "lie")


def test_backend_that_never_answers_is_stopped_at_the_deadline(served: Served, truth: list[int]) -> None:
    tell(served, "hangs")
    before = len(served.calls())
    answer: Answer = ask(served.url, speculation="none", timeout_ms=1500, **ASKED)
    tell(served, "")
    assert answer.last["finish_reason"] == "deadline" and answer.ids == []

    def stops() -> list[str]:
        return [call["id"] for call in served.calls()[before:] if "stop" in call["tensors"]]

    until(stops, "a stop")
    assert stops() == [served.calls()[before]["id"]]
    assert ask(served.url, speculation="none", **ASKED).ids == truth


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"speculation": "lookahead"}, "method 'lookahead'"),
        ({"temperature": 1.0, "rule": "rejection"}, "rule 'rejection'"),
        ({"return_log_probs": True}, "log-probabilities: whole vocabularies of logits"),
        ({"repetition_penalty": 1.3}, "repetition_penalty"),
        ({"cache_salt": "mine"}, "cache_salt keeps the KV blocks of some requests from others"),
    ],
)
def test_what_the_backend_lacks_is_refused_by_name(served: Served, inputs: dict[str, Any], words: str) -> None:
    answer = ask(served.url, **{"speculation": "none", **ASKED, **inputs})
    assert words in answer.error


def test_drawn_text_is_served_and_each_step_has_a_seed_of_its_own(served: Served) -> None:
    before = len(served.calls())
    answer = ask(served.url, speculation="prompt_lookup", temperature=1.0, seed=3, **ASKED)
    assert len(answer.ids) == NUM_TOKENS
    assert all(call["tensors"]["seed"] == ["uint64", [1]] for call in served.calls()[before:])


# Engines that draft by themselves

ENGINES = {"medusa": ("medusa", MEDUSA), "lookahead": ("lookahead_decoding", {**LLAMA_8B, "method": "lookahead"})}


@pytest.fixture(scope="module", params=ENGINES)
def inside(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, str]]:
    folder, (mode, values) = tmp_path_factory.mktemp(request.param), ENGINES[request.param]
    drafts = {"max_draft_len": 63} if mode == "medusa" else {}  # those of the plan, whose tree is the library's own
    target = make_engine(folder / "engines/target", checkpoints / "target", mode=mode, **drafts)
    models = repository(folder, "target", "speculative", "speculative_unary")
    stand_ins(folder, models, values)
    lines = (f'target = "{target}"', 'engine = "tensorrtllm_backend"', f'default_speculation = "{request.param}"')
    (folder / "serving.toml").write_text("\n".join(lines))
    environ = {"SCRIPT_FOLDER": str(folder)}
    with serving(folder / "serving.toml", repository=models, env=environ, stop_limit_s=5) as running:
        yield Served(running, folder), request.param


def test_engine_that_drafts_by_itself_gives_the_text_in_bursts(inside: tuple[Served, str], truth: list[int]) -> None:
    served, _ = inside
    before = len(served.calls())
    answer = ask(served.url, **ASKED)
    assert answer.ids == truth and len(served.calls()) == before + 1
    assert 0 < answer.last["total_accepted_draft_tokens"] <= answer.last["total_draft_tokens"]
    assert answer.last["num_steps"] + answer.last["total_accepted_draft_tokens"] == NUM_TOKENS
    long = ask(served.url, stream=True, **{**ASKED, "max_tokens": 80})
    assert long.ids[:NUM_TOKENS] == truth and len(long.ids) == 80 and len(served.calls()) == before + 4
    assert ask(served.url, speculation="none", **ASKED).ids == truth
    assert len(served.calls()) == before + 4 + NUM_TOKENS


def test_sizes_are_for_lookahead_and_what_it_cannot_do_is_said(inside: tuple[Served, str], truth: list[int]) -> None:
    served, method = inside
    before = len(served.calls())
    config = json.dumps({"window": 2, "ngram": 2, "guesses": 1})
    answer = ask(served.url, speculation=method, speculation_config=config, **ASKED)
    if method == "lookahead":
        assert answer.ids == truth
        assert served.calls()[before]["tensors"]["lookahead_window_size"] == ["int32", [1, 1]]
    else:
        assert "window" in answer.error
    assert "temperature: it is not established" in ask(served.url, temperature=1.0, **ASKED).error
