"""TensorRT-LLM's LLM API behind the target's contract, over a stand-in with the real schema: the library is not run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

pytest.importorskip("smg_grpc_proto")

from build.trtllm.llm_api import LlmApiSpec, load_llm_spec, main, manifest_of, write_folder
from orchestrator.core.context import Context
from orchestrator.core.deployment.capabilities import capabilities_of
from orchestrator.core.deployment.config import ServingConfig, load_config
from orchestrator.core.deployment.engine_manifest import LLM_NAME, read_llm_manifest, served_checkpoint
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import ConfigError, EngineError, RequestError, Unavailable
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import EngineSpeculation, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.none import NoProposer
from orchestrator.drafting.registry import select_method
from runtime.engine.build_engines import build_target
from runtime.trtllm.llm_api import build_llm_api
from tests.standin.decoding import logits_of
from tests.standin.trtllm_serve import CONTRACT, TrtllmServe
from tests.support.clients import until
from tests.support.decode import decode
from tests.support.engines import EngineTarget, ask, make_paged, start_target, submit
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_target

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 32
LIMITS = Limits(NUM_TOKENS, 200, 64)
LIMIT_S = 30.0
GREEDY = Sampling(rule=Rule.ENGINE)
METHODS = ("none", "eagle3", "mtp", "prompt_lookup", "draft_model", "suffix", "pard", "dflash")
INSIDE = StepOptions(engine_speculation=EngineSpeculation(NUM_TOKENS))


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
    drafter = str(checkpoint) if method in ("eagle3", "draft_model", "pard", "dflash") else ""
    return LlmApiSpec(**{"method": method, "target": str(checkpoint), "drafter": drafter, "max_seq_len": 256, **more})


def config_of(folder: Path, **keys: Any) -> ServingConfig:
    return ServingConfig(**{"target": str(folder), "engine": "llm_api", **keys})


@contextmanager
def serving(checkpoint: Path, folder: Path, method: str = "eagle3", **more: Any) -> Iterator[tuple[Any, TrtllmServe]]:
    """A target's client over the LLM API, and the server that it calls."""
    server = TrtllmServe(write_folder(spec_of(checkpoint, method, **more), folder).command, folder)
    with server.listening() as address:
        client, manifest = build_target(config_of(folder, llm_api_address=address))
        assert manifest.vocab_size == VOCAB_SIZE
        try:
            yield client, server
        finally:
            client.close()


def proposer_of(method: str) -> Any:
    materials = ProposerDependencies(drafter_client=lambda name: None, vocab_size=VOCAB_SIZE)
    return select_method(method, "", frozenset(), {}, engine_method=method).proposer(materials)


def step(
    ids: list[int],
    options: StepOptions = StepOptions(),  # noqa: B008
    sampling: Sampling = GREEDY,
    sequence_id: int = 1,
    salt: str = "",
) -> StepRequest:
    return StepRequest(delta_of(Context(ids), 0, sequence_id, salt), TokenTree.bare(), sampling, options, 60_000)


# The text


@pytest.mark.parametrize("method", METHODS)
def test_text_is_the_torch_engine_s_from_one_generation(
    checkpoint: Path, tmp_path: Path, greedy: list[int], method: str
) -> None:
    with serving(checkpoint, tmp_path, method) as (client, server):
        text, statistics = decode(EngineTarget(client, 7), proposer_of(method), PROMPT, GREEDY, LIMITS)
        assert len(server.requests) == 1
    assert text == greedy
    assert (0 < statistics.num_accepted_tokens < NUM_TOKENS) == (method != "none")
    assert statistics.num_draft_tokens >= statistics.num_accepted_tokens


@pytest.mark.parametrize(("counts", "merge"), [(True, 1), (False, 1), (True, 99)])
def test_passes_and_drafts_are_counted_with_and_without_the_server_s_counts(
    checkpoint: Path, tmp_path: Path, greedy: list[int], counts: bool, merge: int
) -> None:
    """With its counts the sums are the server's even where one message brings all passes."""
    with serving(checkpoint, tmp_path) as (client, server):
        text, expected = decode(EngineTarget(client, 7), proposer_of("eagle3"), PROMPT, GREEDY, LIMITS)
        server.counts, server.merge = counts, merge
        again, found = decode(EngineTarget(client, 8), proposer_of("eagle3"), PROMPT, GREEDY, LIMITS)
    assert text == again == greedy
    assert found.num_accepted_tokens == expected.num_accepted_tokens
    if counts:
        assert found.num_draft_tokens == pytest.approx(expected.num_draft_tokens, abs=4)  # one pass's


def test_text_goes_on_when_the_whole_context_is_sent_anew(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    with serving(checkpoint, tmp_path) as (client, _):
        text, _ = decode(EngineTarget(client, 7, stateless=True), proposer_of("eagle3"), PROMPT, GREEDY, LIMITS)
    assert text == greedy


def test_step_that_wants_no_drafts_is_one_token(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    with serving(checkpoint, tmp_path) as (client, _):
        text, statistics = decode(EngineTarget(client, 7), NoProposer(), PROMPT, GREEDY, LIMITS)
    assert text == greedy and statistics.num_steps == NUM_TOKENS


def test_eight_at_once_are_streamed_together(checkpoint: Path, tmp_path: Path) -> None:
    prompts = [[n + 1, n + 2, n + 1, n + 2, 3] for n in range(8)]
    with serving(checkpoint, tmp_path) as (client, server):
        server.passes = 0
        answers = [submit(client, step(p, INSIDE, sequence_id=n)) for n, p in enumerate(prompts, start=1)]
        until(lambda: server.most_at_once >= 8, "eight requests at once")
        server.passes = float("inf")
        first = [answer.get(timeout=LIMIT_S).tokens(TokenTree.bare())[0] for answer in answers]
    assert first == [int(logits_of(str(checkpoint), tuple(p), 1)[0].argmax()) for p in prompts]


# What a generation is told


def test_drawn_text_has_the_sampling_and_the_seed(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path, "none") as (client, server):
        texts = {
            seed: decode(
                EngineTarget(client, seed),
                proposer_of("none"),
                PROMPT,
                Sampling(0.7, 9, 0.8, seed=seed, rule=Rule.ENGINE),
                LIMITS,
            )[0]
            for seed in (5, 6)
        }
        config = server.requests[0].sampling_config
        again, _ = decode(
            EngineTarget(client, 9),
            proposer_of("none"),
            PROMPT,
            Sampling(0.7, 9, 0.8, seed=5, rule=Rule.ENGINE),
            LIMITS,
        )
    assert (config.temperature, config.top_k, config.top_p, config.seed) == (np.float32(0.7), 9, np.float32(0.8), 5)
    assert texts[5] == again != texts[6]


def test_log_probabilities_are_the_server_s_with_the_likeliest(checkpoint: Path, tmp_path: Path) -> None:
    options = replace(INSIDE, logprobs=True, num_top=3)
    with serving(checkpoint, tmp_path, "none") as (client, _):
        answer = ask(client, step(PROMPT, options))
    row = logits_of(str(checkpoint), tuple(PROMPT), 1)[0]
    log_p = row - row.max() - np.log(np.exp(row - row.max()).sum())
    assert answer.logprobs[0] == pytest.approx(log_p.max(), abs=1e-6)
    assert answer.top_ids[0].tolist() == np.argsort(-log_p, kind="stable")[:3].tolist()
    assert answer.top_logprobs.shape == (answer.num_tokens, 3) and len(answer.logprobs) == answer.num_tokens


def test_generation_is_as_long_as_what_may_still_come(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as (client, server):
        ask(client, step(PROMPT, StepOptions(engine_speculation=EngineSpeculation(5))))
        ask(client, step([1] * 250, StepOptions(engine_speculation=EngineSpeculation(50)), sequence_id=2))
        assert [request.max_tokens for request in server.requests] == [5, 6]
        with pytest.raises(RequestError, match="has 256 tokens, the LLM API was started for at most 255"):
            ask(client, step([1] * 256, sequence_id=3))


# The life of a call


def test_release_aborts_the_generation(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as (client, server):
        server.passes = 1
        ask(client, step(PROMPT, StepOptions(engine_speculation=EngineSpeculation(200)), sequence_id=4))
        client.release(4)
        until(lambda: server.aborted, "the end of the generation")
        assert client.status().num_sequences == 0


def test_deadline_ends_the_generation_and_answers(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    with serving(checkpoint, tmp_path) as (client, server):
        server.passes = 0
        answers: SimpleQueue[Any] = SimpleQueue()
        client.submit(step(PROMPT, INSIDE), time.monotonic() + 0.1, answers.put)
        answer = answers.get(timeout=LIMIT_S)
        assert isinstance(answer, Unavailable) and "deadline" in str(answer)
        until(lambda: server.aborted, "the end of the generation")
        server.passes = float("inf")
        assert ask(client, step(PROMPT)).next_token == greedy[0]


def test_request_that_fails_is_one_line_and_alone(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    with serving(checkpoint, tmp_path) as (client, server):
        server.poison = 50
        poisoned = submit(client, step([50, 3], INSIDE, sequence_id=2))
        sound = submit(client, step(PROMPT, sequence_id=3))
        error = poisoned.get(timeout=LIMIT_S)
        assert type(error) is EngineError and str(error) == "TensorRT-LLM failed on this request: poisoned"
        assert sound.get(timeout=LIMIT_S).next_token == greedy[0]


def test_request_that_the_server_refuses_is_a_refusal(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as (client, server):
        server.max_seq_len = 9
        with pytest.raises(RequestError, match="refused the request: 8 \\+ 32 tokens exceed max_seq_len 9"):
            ask(client, step(PROMPT, INSIDE))


def test_server_that_dies_is_unavailable_until_it_is_back(checkpoint: Path, tmp_path: Path, greedy: list[int]) -> None:
    server = TrtllmServe(write_folder(spec_of(checkpoint), tmp_path).command, tmp_path)
    with server.listening() as address:
        client, _ = build_target(config_of(tmp_path, llm_api_address=address))
        server.passes = 0
        held = submit(client, step(PROMPT, INSIDE))
        until(lambda: server.requests, "the request")
    lost = held.get(timeout=LIMIT_S)
    assert isinstance(lost, Unavailable | EngineError)
    with pytest.raises(Unavailable, match=f"trtllm-serve at {address} cannot be reached"):
        ask(client, step(PROMPT, INSIDE, sequence_id=2))
    with TrtllmServe(read_llm_manifest(tmp_path).command, tmp_path).listening(int(address.split(":")[1])):

        def is_back() -> bool:
            answer = submit(client, step(PROMPT, sequence_id=3)).get(timeout=LIMIT_S)
            return not isinstance(answer, Exception) and answer.next_token == greedy[0]

        until(is_back, "the server")
    client.close()


def test_close_answers_what_is_under_way(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as (client, server):
        server.passes = 0
        answers = submit(client, step(PROMPT, INSIDE))
    assert str(answers.get(timeout=LIMIT_S)) == "the engine is shutting down"
    assert not any(thread.name == "llm-api" for thread in threading.enumerate())


# What is refused


@pytest.mark.parametrize(
    ("method", "sampling", "options", "words"),
    [
        ("eagle3", Sampling(1.0), StepOptions(), "temperature: trtllm-serve drafts for greedy requests only"),
        ("eagle3", Sampling(), StepOptions(logprobs=True), "log-probabilities: it is not established for drafts"),
        ("none", Sampling(repetition_penalty=1.2), StepOptions(), "repetition_penalty"),
        ("none", Sampling(min_tokens=3, logits_options=LogitsOptions(end_ids=(1,))), StepOptions(), "min_tokens"),
        ("none", Sampling(1.0, typical_p=0.5), StepOptions(), "typical_p"),
        ("none", Sampling(rule=Rule.COUPLED), StepOptions(), "rule 'coupled'"),
        ("none", Sampling(), StepOptions(target_tokens=True), "learns from the target's tokens"),
    ],
)
def test_option_that_it_lacks_is_refused_with_the_reason(
    checkpoint: Path, tmp_path: Path, method: str, sampling: Sampling, options: StepOptions, words: str
) -> None:
    rule = sampling.rule if "rule" in words else Rule.ENGINE
    with serving(checkpoint, tmp_path, method) as (client, server), pytest.raises(RequestError) as caught:
        ask(client, step(PROMPT, options, replace(sampling, rule=rule)))
    assert words in str(caught.value) and "\n" not in str(caught.value) and not server.requests


def test_salt_is_refused_where_blocks_are_shared_and_only_there(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path) as (client, _), pytest.raises(RequestError, match="does not hand it on"):
        ask(client, step(PROMPT, salt="mine"))
    with serving(checkpoint, tmp_path, block_reuse=False) as (client, server):
        ask(client, step(PROMPT, salt="mine"))
        assert server.options["kv_cache_config"] == {"enable_block_reuse": False}


def test_drawn_requests_are_served_beside_drafts_where_the_file_says_so(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path, sampling=True) as (client, server):
        ask(client, step(PROMPT, INSIDE, Sampling(1.0, rule=Rule.ENGINE)))
        assert server.options["speculative_config"]["allow_advanced_sampling"] is True


def test_capabilities_name_the_one_method(checkpoint: Path, tmp_path: Path) -> None:
    write_folder(spec_of(checkpoint, "pard"), tmp_path)
    served = capabilities_of(config_of(tmp_path))
    assert served.engine_method == "pard" and served.default_rule is Rule.ENGINE
    assert served.method_refusal("pard") == served.method_refusal("none") == ""
    assert "it drafts by itself, with the method 'pard'" in served.method_refusal("suffix")
    with pytest.raises(RequestError, match="unknown method 'pard'"):
        select_method("pard", "", frozenset(), {})


# The start


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("version", "1.3.0rc20", r"says version 1\.3\.0rc20, llm_api\.json 1\.3\.0rc27: start it with the command"),
        ("max_seq_len", 99, "says max_seq_len 99, llm_api.json 260"),
        ("health", "Executor is unhealthy", "is not ready after 0 s: its health is 'Executor is unhealthy'"),
    ],
)
def test_server_that_is_another_than_the_folder_says_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(build_llm_api, "START_LIMIT_S", 0.0)
    server = TrtllmServe(write_folder(spec_of(checkpoint), tmp_path).command, tmp_path)
    setattr(server, name, value)
    with server.listening() as address, pytest.raises(ConfigError, match=words):
        build_target(config_of(tmp_path, llm_api_address=address))


def test_missing_server_extra_or_sharing_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_llm_api, "START_LIMIT_S", 0.0)
    write_folder(spec_of(checkpoint), tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be reached: .*\(key llm_api_address\)"):
        build_target(config_of(tmp_path, llm_api_address="127.0.0.1:1"))
    with pytest.raises(ConfigError, match="prefix_sharing must be true"):
        build_target(config_of(tmp_path, prefix_sharing=False))
    monkeypatch.setitem(sys.modules, "runtime.trtllm.llm_api.transport", None)
    with pytest.raises(ConfigError, match=r"needs the extra llmapi: pip install '\.\[llmapi\]'"):
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


def test_command_writes_a_folder_from_the_file_of_compiled_engines_and_says_how_to_serve_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ('method = "prompt_lookup"', "draft_len = 6", "num_gpus = 2", "max_seq_len = 300", "tokens_per_block = 64")
    assert main([str(engines_file(tmp_path, checkpoint, *lines)), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == (
        "# in nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc27\n"
        f"cd {tmp_path}/out && trtllm-serve {checkpoint} --grpc --host 0.0.0.0 --port 8010 --config options.yaml "
        "--tp_size 2 --max_batch_size 8 --max_num_tokens 8192 --max_seq_len 306\n"
    )
    found = TrtllmServe(read_llm_manifest(tmp_path / "out").command, tmp_path / "out")
    assert found.options == {
        "enable_chunked_prefill": True,
        "kv_cache_config": {"enable_block_reuse": True},
        "disable_overlap_scheduler": True,
        "speculative_config": {
            "decoding_type": "NGram",
            "max_draft_len": 6,
            "max_matching_ngram_size": 3,
            "is_public_pool": False,
        },
    }
    assert CONTRACT["types"]["NGram"]["is_public_pool"]["default"] is True


def test_file_without_a_method_drafts_nothing(checkpoint: Path, tmp_path: Path) -> None:
    found = manifest_of(load_llm_spec(engines_file(tmp_path, checkpoint)))
    assert (found.method, found.max_draft_len) == ("none", 0) and "speculative_config" not in found.options


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('quantisation = "fp8"', "quantisation is for compiled engines"),
        ('metod = "mtp"', "unknown key 'metod'; did you mean 'method'"),
        ('draft_len = "3"', "draft_len must be an integer in 0..128, got '3'"),
        ('method = "medusa"', "method 'medusa' is not for the LLM API"),
        ('trtllm_version = "1.2.1"', "trtllm-serve of TensorRT-LLM 1.2.1 has no --grpc, which came with 1.3"),
        ('trtllm_version = "1.4.0rc4"', "the LLM API's names in TensorRT-LLM 1.4.0rc4 are not known here (known: 1.3;"),
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
    for method in ("eagle3", "mtp", "dflash"):
        file.write_text(f'target = "llm"\nengine = "llm_api"\ndefault_speculation = "{method}"')
        assert load_config(file, {}).default_speculation == method
    file.write_text('target = "llm"\nengine = "llm_api"\ndraft = "llm"')
    with pytest.raises(ConfigError, match="loads no drafter \\(key draft in"):
        load_config(file, {})
