"""TensorRT-LLM's LLM API behind the target's contract, over a stand-in for it: the library is not run here."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from build.trtllm.llm_api import LlmApiSpec, load_llm_spec, main, manifest_of, write_folder
from orchestrator.core.context import Context
from orchestrator.core.deployment.capabilities import capabilities_of
from orchestrator.core.deployment.config import ServingConfig, load_config
from orchestrator.core.deployment.engine_manifest import LLM_NAME, read_llm_manifest, served_checkpoint
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import ConfigError, EngineError, EngineLost, RequestError, ServingError, Unavailable
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import EngineSpeculation, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.none import NoProposer
from orchestrator.drafting.registry import select_method
from runtime.engine.build_engines import build_target
from runtime.trtllm.llm_api import transport
from tests.standin import importable
from tests.support.clients import until
from tests.support.decode import decode
from tests.support.engines import EngineTarget, ask, make_paged, start_target, submit
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_target

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 32
LIMITS = Limits(NUM_TOKENS, 200, 64)
LIMIT_S = 30.0
GREEDY = Sampling(rule=Rule.ENGINE)
METHODS = ("none", "eagle3", "mtp", "prompt_lookup", "draft_model")


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with importable():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def greedy(checkpoint: Path) -> list[int]:
    """The text of our own engine."""
    engine = start_target(make_paged(checkpoint))
    text, _ = decode(EngineTarget(engine, 1), NoProposer(), PROMPT, Sampling(), LIMITS)
    engine.close()
    return text


def spec_of(checkpoint: Path, method: str = "eagle3", **more: Any) -> LlmApiSpec:
    drafter = str(checkpoint) if method in ("eagle3", "draft_model") else ""
    return LlmApiSpec(**{"method": method, "target": str(checkpoint), "drafter": drafter, "max_seq_len": 256, **more})


def config_of(folder: Path, **keys: Any) -> ServingConfig:
    return ServingConfig(**{"target": str(folder), "engine": "llm_api", **keys})


@contextmanager
def serving(checkpoint: Path, folder: Path, method: str = "eagle3", **more: Any) -> Iterator[Any]:
    """A target's client over the LLM API."""
    write_folder(spec_of(checkpoint, method, **more), folder)
    client, manifest = build_target(config_of(folder))
    assert manifest.vocab_size == VOCAB_SIZE
    try:
        yield client
    finally:
        client.close()
    assert standin(client).is_shut


def standin(client: Any) -> Any:
    """The stand-in behind a client, for its knobs."""
    return client._transport.llm


def proposer_of(method: str) -> Any:
    materials = ProposerDependencies(drafter_client=lambda name: None, vocab_size=VOCAB_SIZE)
    return select_method(method, "", frozenset(), {}, engine_method=method).proposer(materials)


def step(
    ids: list[int],
    options: StepOptions = StepOptions(),  # noqa: B008
    sampling: Sampling = GREEDY,
    sequence_id: int = 1,
) -> StepRequest:
    return StepRequest(delta_of(Context(ids), 0, sequence_id, ""), TokenTree.bare(), sampling, options, 60_000)


INSIDE = StepOptions(engine_speculation=EngineSpeculation(NUM_TOKENS))


# The text


@pytest.mark.parametrize("method", METHODS)
def test_text_is_the_torch_engine_s_from_one_generation(
    checkpoint: Path, tmp_path: Path, greedy: list[int], method: str
) -> None:
    with serving(checkpoint, tmp_path, method) as client:
        before = len(standin(client).requests)
        text, statistics = decode(EngineTarget(client, 7), proposer_of(method), PROMPT, GREEDY, LIMITS)
        assert len(standin(client).requests) == before + 1
    assert text == greedy
    if method == "none":
        assert statistics.num_accepted_tokens == 0
    else:
        assert 0 < statistics.num_accepted_tokens < NUM_TOKENS
    assert statistics.num_draft_tokens >= statistics.num_accepted_tokens


def test_text_goes_on_when_the_whole_context_is_sent_anew(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    with serving(checkpoint, tmp_path) as client:
        target = EngineTarget(client, 7, stateless=True)
        text, _ = decode(target, proposer_of("eagle3"), PROMPT, GREEDY, LIMITS)
    assert text == greedy


def test_step_that_wants_no_drafts_is_one_token(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    with serving(checkpoint, tmp_path) as client:
        text, statistics = decode(EngineTarget(client, 7), NoProposer(), PROMPT, GREEDY, LIMITS)
    assert text == greedy and statistics.num_steps == NUM_TOKENS


def test_eight_at_once_are_streamed_together(checkpoint: Path, tmp_path: Path) -> None:
    limits = Limits(12, 200, 64)
    prompts = [[n + 1, n + 2, n + 1, n + 2, 3] for n in range(8)]
    engine = start_target(make_paged(checkpoint))
    expected = [decode(EngineTarget(engine, 1), NoProposer(), p, Sampling(), limits)[0] for p in prompts]
    engine.close()
    texts: dict[int, list[int]] = {}
    with serving(checkpoint, tmp_path) as client:
        standin(client).gate.clear()

        def run(number: int) -> None:
            target = EngineTarget(client, number + 1)
            texts[number], _ = decode(target, proposer_of("eagle3"), prompts[number], GREEDY, limits)
            target.release()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: standin(client).most_at_once >= 8, "eight requests at once")
        standin(client).gate.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert [texts[number] for number in range(8)] == expected


# What a generation is told


@pytest.mark.parametrize("sampling", [Sampling(0.7, seed=5), Sampling(1.0, top_k=9, top_p=0.8, seed=6)])
def test_drawn_text_is_not_greedy_and_has_the_seed(checkpoint: Path, tmp_path: Path, sampling: Sampling) -> None:
    with serving(checkpoint, tmp_path, "none") as client:
        ask(client, step(PROMPT, INSIDE, replace(sampling, rule=Rule.ENGINE)))
        _, params, _ = standin(client).requests[-1]
    assert not params.greedy
    found = (params.temperature, params.top_k or 0, params.top_p, params.seed)
    assert found == (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)


def test_salts_are_handed_on(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as client:
        for salt in ("", "mine"):
            delta = delta_of(Context(PROMPT), 0, 3, salt)
            ask(client, StepRequest(delta, TokenTree.bare(), GREEDY, StepOptions(), 1000))
            assert standin(client).requests[-1][2] == (salt or None)


def test_generation_is_as_long_as_what_may_still_come(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as client:
        ask(client, step(PROMPT, StepOptions(engine_speculation=EngineSpeculation(5))))
        assert standin(client).requests[-1][1].max_tokens == 5
        ask(client, step([1] * 250, StepOptions(engine_speculation=EngineSpeculation(50)), sequence_id=2))
        assert standin(client).requests[-1][1].max_tokens == 6
        with pytest.raises(RequestError, match="has 256 tokens, the engine was built for at most 255"):
            ask(client, step([1] * 256, sequence_id=3))


@pytest.mark.parametrize(
    ("method", "reuse", "speculation"),
    [("none", True, None), ("eagle3", False, "Eagle3"), ("prompt_lookup", True, "NGram"), ("mtp", True, "MTP")],
)
def test_llm_is_made_as_the_folder_says(
    checkpoint: Path, tmp_path: Path, method: str, reuse: bool, speculation: str | None
) -> None:
    write_folder(spec_of(checkpoint, method, draft_len=3), tmp_path)
    client, _ = build_target(config_of(tmp_path, prefix_sharing=reuse))
    client.close()
    llm = standin(client)
    assert (llm.checkpoint, llm.reuses, llm.max_batch_size) == (str(checkpoint), reuse, 8)
    assert (llm.speculation and llm.speculation.decoding_type) == speculation
    assert llm.max_seq_len == 256 + (3 if speculation else 0)


# The life of a call


def test_release_aborts_the_generation(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as client:
        ask(client, step(PROMPT, StepOptions(engine_speculation=EngineSpeculation(200)), sequence_id=4))
        standin(client).gate.clear()
        aborted = len(standin(client).aborted)
        client.release(4)
        until(lambda: len(standin(client).aborted) > aborted, "the end of the generation")
        assert client.status().num_sequences == 0


def test_deadline_ends_the_generation_and_answers(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    with serving(checkpoint, tmp_path) as client:
        standin(client).gate.clear()
        answers: SimpleQueue[Any] = SimpleQueue()
        client.submit(step(PROMPT, INSIDE), time.monotonic() + 0.1, answers.put)
        answer = answers.get(timeout=LIMIT_S)
        assert isinstance(answer, Unavailable) and "deadline" in str(answer)
        until(lambda: standin(client).aborted, "the end of the generation")
        standin(client).gate.set()
        assert ask(client, step(PROMPT)).next_token == greedy[0]


def test_request_that_fails_is_one_line_and_alone(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    with serving(checkpoint, tmp_path) as client:
        standin(client).poison = 50
        poisoned, sound = (
            submit(client, step([50, 3], INSIDE, sequence_id=2)),
            submit(client, step(PROMPT, sequence_id=3)),
        )
        error = poisoned.get(timeout=LIMIT_S)
        assert type(error) is EngineError and str(error) == "TensorRT-LLM failed on this request: poisoned"
        assert sound.get(timeout=LIMIT_S).next_token == greedy[0]


@pytest.mark.parametrize("idle", [True, False])
def test_worker_that_has_died_is_an_engine_lost(checkpoint: Path, tmp_path: Path, idle: bool) -> None:
    told: SimpleQueue[Any] = SimpleQueue()
    with serving(checkpoint, tmp_path) as client:
        client.on_broken(lambda: told.put("broken"))
        standin(client).gate.clear()
        if not idle:
            client.submit(step(PROMPT, INSIDE), time.monotonic() + LIMIT_S, told.put)
        standin(client).break_down()
        if idle:
            client.submit(step(PROMPT, INSIDE), time.monotonic() + LIMIT_S, told.put)
        assert {type(told.get(timeout=LIMIT_S)), type(told.get(timeout=LIMIT_S))} == {EngineLost, str}
        assert isinstance(submit(client, step(PROMPT, INSIDE)).get(timeout=LIMIT_S), EngineLost)


def test_llm_is_shut_down_though_its_loop_hangs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SHUTDOWN_LIMIT_S", 0.2)
    held = threading.Event()
    with serving(checkpoint, tmp_path) as client:
        client._transport._loop.call_soon_threadsafe(held.wait)
    assert standin(client).is_shut
    held.set()
    client._transport._thread.join(LIMIT_S)


def test_request_that_the_library_refuses_is_its_first_line(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as client:
        standin(client).max_seq_len = 9
        with pytest.raises(EngineError, match="failed on this request: 8 \\+ 32 tokens exceed max_seq_len 9"):
            ask(client, step(PROMPT, INSIDE))


def test_close_answers_what_is_under_way(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as client:
        standin(client).gate.clear()
        answers = submit(client, step(PROMPT, INSIDE))
    assert str(answers.get(timeout=LIMIT_S)) == "the engine is shutting down"


# What is refused


@pytest.mark.parametrize(
    ("method", "sampling", "options", "words"),
    [
        (
            "eagle3",
            Sampling(1.0),
            StepOptions(),
            "temperature: it is not established for engines that draft by themselves",
        ),
        ("none", Sampling(repetition_penalty=1.2), StepOptions(), "repetition_penalty"),
        ("none", Sampling(min_tokens=3, logits_options=LogitsOptions(end_ids=(1,))), StepOptions(), "min_tokens"),
        ("none", Sampling(1.0, typical_p=0.5), StepOptions(), "typical_p"),
        ("none", Sampling(), StepOptions(logprobs=True), "log-probabilities: it is not established for the LLM API"),
        ("none", Sampling(rule=Rule.COUPLED), StepOptions(), "rule 'coupled'"),
        ("none", Sampling(), StepOptions(target_tokens=True), "learns from the target's tokens"),
    ],
)
def test_option_that_it_lacks_is_refused_with_the_reason(
    checkpoint: Path, tmp_path: Path, method: str, sampling: Sampling, options: StepOptions, words: str
) -> None:
    rule = sampling.rule if "rule" in words else Rule.ENGINE
    with serving(checkpoint, tmp_path, method) as client, pytest.raises(RequestError) as caught:
        ask(client, step(PROMPT, options, replace(sampling, rule=rule)))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_capabilities_name_the_one_method(checkpoint: Path, tmp_path: Path) -> None:
    write_folder(spec_of(checkpoint, "mtp"), tmp_path)
    served = capabilities_of(config_of(tmp_path))
    assert served.engine_method == "mtp" and served.default_rule is Rule.ENGINE
    assert served.method_refusal("mtp") == served.method_refusal("none") == ""
    assert "it drafts by itself, with the method 'mtp'" in served.method_refusal("suffix")
    assert (
        select_method("mtp", "", frozenset(), {}, served.engine_method).declaration.proposer
        == "engine_side:EngineSideProposer"
    )
    with pytest.raises(RequestError, match="unknown method 'mtp'"):
        select_method("mtp", "", frozenset(), {})


def test_missing_library_names_the_container(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(spec_of(checkpoint), tmp_path)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ConfigError, match=r"run the server in the container nvcr\.io/nvidia/tritonserver:26\.07"):
        build_target(config_of(tmp_path))


def test_names_of_another_release_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    write_folder(spec_of(checkpoint, trtllm_version="1.1.0"), tmp_path)
    with pytest.raises(
        ConfigError, match=r"are those of TensorRT-LLM 1\.1\.0, this is 1\.2\.1 \(make the folder again"
    ):
        build_target(config_of(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere"}, "cannot load /nowhere: no checkpoint in /nowhere"),
        ({"keywords": {"backend": "tensorrt"}}, "has the backend pytorch"),
        ({"keywords": {"tensor_parallel_size": 2}}, "larger than the number of GPUs"),
        ({"speculative_config": {"decoding_type": "Eagle3", "draft_len": 3}}, "extra fields not permitted"),
        ({"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}, "needs disable_overlap_scheduler"),
    ],
)
def test_what_the_library_refuses_is_told_in_its_words(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_folder(spec_of(checkpoint), tmp_path)
    read_llm_manifest(tmp_path).model_copy(update=changes).write(tmp_path)
    with pytest.raises(ConfigError, match=words):
        build_target(config_of(tmp_path))


# The folder, and the command that makes it


def test_folder_serves_as_the_target_s_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    write_folder(spec_of(checkpoint, max_seq_len=100), tmp_path)
    served = served_checkpoint(config_of(tmp_path))
    assert (served.vocab_size, served.max_positions) == (VOCAB_SIZE, 100)
    assert served.tokenizer_file == str(tmp_path / "tokenizer.json")
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("content", "words"),
    [("[]", "must be a JSON object, got list"), ("{", "is not JSON"), ("{}", "method is missing")],
)
def test_broken_folder_is_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a folder that python -m build\.trtllm\.llm_api has made"):
        read_llm_manifest(tmp_path)
    (tmp_path / LLM_NAME).write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_llm_manifest(tmp_path)


def engines_file(folder: Path, checkpoint: Path, *lines: str) -> Path:
    file = folder / "engines.toml"
    file.write_text("\n".join((f'target = "{checkpoint}"', 'gpu = "h100"', *lines)))
    return file


def test_command_writes_a_folder_from_the_file_of_compiled_engines(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ('method = "prompt_lookup"', "draft_len = 6", "num_gpus = 2", "max_seq_len = 300", "tokens_per_block = 64")
    assert main([str(engines_file(tmp_path, checkpoint, *lines)), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/out/{LLM_NAME}\n"
    found = read_llm_manifest(tmp_path / "out")
    assert found.method == "prompt_lookup" and found.max_seq_len == 300 and found.max_draft_len == 6
    assert found.keywords == {
        "backend": "pytorch",
        "tensor_parallel_size": 2,
        "max_batch_size": 8,
        "max_seq_len": 306,
        "max_num_tokens": 8192,
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": True,
    }
    assert found.config_class == "NGramDecodingConfig"
    assert found.speculative_config["decoding_type"] == "NGram"


def test_file_without_a_method_drafts_nothing(checkpoint: Path, tmp_path: Path) -> None:
    found = manifest_of(load_llm_spec(engines_file(tmp_path, checkpoint)))
    assert (found.method, found.speculative_config, found.max_draft_len) == ("none", {}, 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('quantisation = "fp8"', "quantisation is for compiled engines"),
        ('metod = "mtp"', "unknown key 'metod'; did you mean 'method'"),
        ('draft_len = "3"', "draft_len must be an integer in 0..128, got '3'"),
        ("max_seq_len = -1", "max_seq_len must be an integer in 2..16777216, got -1"),
        ('method = "medusa"', "method 'medusa' is not for the LLM API"),
    ],
)
def test_file_that_is_wrong_is_refused_in_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    assert main([str(engines_file(tmp_path, checkpoint, line)), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_deployment_names_no_drafter_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    write_folder(spec_of(checkpoint), tmp_path / "llm")
    file = tmp_path / "serving.toml"
    file.write_text('target = "llm"\nengine = "llm_api"\ndefault_speculation = "eagle3"')
    assert load_config(file, {}).default_speculation == "eagle3"
    file.write_text('target = "llm"\nengine = "llm_api"\ndefault_speculation = "mtp"')
    assert load_config(file, {}).default_speculation == "mtp"
    file.write_text('target = "llm"\nengine = "llm_api"\ndraft = "llm"')
    with pytest.raises(ConfigError, match="loads no drafter \\(key draft in"):
        load_config(file, {})
    assert issubclass(ConfigError, ServingError) and json.loads((tmp_path / "llm" / LLM_NAME).read_text())
