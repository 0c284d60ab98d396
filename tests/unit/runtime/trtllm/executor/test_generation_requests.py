"""What a request becomes where the target is an engine of TensorRT-LLM: its rule, its method, its limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from orchestrator.core.arrays import Tensors
from orchestrator.core.context import Context
from orchestrator.core.deployment.capabilities import capabilities_of
from orchestrator.core.deployment.config import load_config
from orchestrator.core.deployment.engine_manifest import served_checkpoint
from orchestrator.core.errors import ConfigError, RequestError
from orchestrator.core.grammar import Grammars
from orchestrator.core.methods import METHODS, PROPOSED
from orchestrator.core.sampling_params import Rule, as_float32
from orchestrator.core.types import EngineSpeculation, StepOptions
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import read
from orchestrator.server.request_builder import RequestBuilder
from orchestrator.server.responses import Responses
from orchestrator.server.text import Chunk, FinishReason
from tests.standin.engine_folder import BUILD_MODES, SPEC, make_engine
from tests.support.executor import config_of

WORDS = "the target's engine does not serve "


def builder_of(checkpoint: Path, folder: Path, **options: Any) -> RequestBuilder:
    """Return what checks requests to an engine."""
    method = options.get("method") or BUILD_MODES.get(options.get("mode", ""), "prompt_lookup")
    config = config_of(make_engine(folder, checkpoint, **options), default_speculation=method)
    served = served_checkpoint(config)
    grammars = Grammars(served.tokenizer_file, served.vocab_size, served.eos_ids)
    return RequestBuilder(config, served, frozenset({"draft"}), grammars, capabilities=capabilities_of(config))


@pytest.fixture
def external(checkpoint: Path, tmp_path: Path) -> RequestBuilder:
    return builder_of(checkpoint, tmp_path / "external", max_input_len=40)


def built(builder: RequestBuilder, **inputs: Any) -> GenerationRequest:
    return builder.build(read({}, json.dumps({"text_input": "abcd", "max_tokens": 8, **inputs})))


def _no_client(name: str) -> NoReturn:
    raise AssertionError(f"a client to {name}")


def refusal(builder: RequestBuilder, **inputs: Any) -> str:
    with pytest.raises(RequestError) as caught:
        built(builder, **inputs)
    return str(caught.value)


def test_rule_is_the_engine_s_own_and_no_other(external: RequestBuilder) -> None:
    assert built(external).sampling.rule is built(external, rule="engine").sampling.rule is Rule.ENGINE
    for rule in ("coupled", "block", "typical"):
        assert refusal(external, rule=rule).startswith(f"{WORDS}the rule {rule!r}: ")
    assert built(external, use_draft_logits=True).sampling.rule is Rule.REJECTION
    assert "unknown rule 'magic' (allowed: engine; input rule)" in refusal(external, rule="magic")


def test_epsilon_is_the_engine_s_unless_a_request_names_one(checkpoint: Path, tmp_path: Path) -> None:
    plan = {"servers": {}, "spec": SPEC | {"eagle_posterior": 0.2}}
    builder = builder_of(checkpoint, tmp_path / "eagle2", mode="eagle", method="eagle2", plan=plan)
    asked = {"temperature": 0.7, "speculation": "eagle2"}
    assert built(builder, **asked).sampling.rule is Rule.TYPICAL
    assert built(builder, **asked).sampling.epsilon == as_float32(0.2)
    assert built(builder, **asked, typical_epsilon=0.5).sampling.epsilon == 0.5
    assert built(builder).sampling.temperature == builder.default.sampling.temperature == 1.0
    for more, words in (
        ({"typical_epsilon": 1.0}, "typical_epsilon 1: TensorRT-LLM takes 0 to below 1 (input typical_epsilon)"),
        ({"typical_delta": 0.5}, "typical_delta: TensorRT-LLM uses the square root of typical_epsilon (input typical"),
        ({"temperature": 0.0}, "temperature 0: this engine is deployed for sampling (key eagle_posterior of the eng"),
    ):
        assert refusal(builder, **asked | more).startswith(f"{WORDS}{words}")


def test_rule_is_told_with_what_a_seed_is_worth_under_it(external: RequestBuilder) -> None:
    told = {t: _rule_told(external, temperature=t) for t in (0.0, 0.5)}
    assert told == {0.0: "engine", 0.5: "engine (a seed does not fix the text)"}


def _rule_told(builder: RequestBuilder, **inputs: Any) -> str:
    sent: list[Tensors] = []
    job = built(builder, **inputs)
    sequence = job.sequence(0, builder.checkpoint.tokenizer)
    sequence.output.finish = FinishReason.LENGTH
    Responses(job, sequence, sent.append).emit(Chunk("", [], []))
    text: bytes = sent[0]["rule"][0, 0]
    return text.decode()


def test_drafts_are_no_more_than_the_engine_takes(external: RequestBuilder) -> None:
    assert built(external, num_draft_tokens=16).limits.budget(Context([1])).max_nodes == 16
    # suffix would draft 32 by itself
    by_default = built(external, speculation="suffix", speculation_config='{"tree": false}')
    assert by_default.limits.budget(Context([1])).max_nodes == 16
    assert built(external, speculation_config='{"max_nodes": 3}').limits.budget(Context([1])).max_nodes == 3


@pytest.mark.parametrize(
    ("inputs", "where"),
    [
        ({"num_draft_tokens": 17}, "input num_draft_tokens"),
        ({"speculation_config": '{"draft_len": 17}'}, "draft_len in input speculation_config"),
        ({"speculation_config": '{"draft_len": 17}', "num_draft_tokens": 3}, "draft_len in input speculation_config"),
    ],
)
def test_draft_length_beyond_the_engine_s_is_refused_naming_the_limit(
    external: RequestBuilder, inputs: dict[str, Any], where: str
) -> None:
    words = f"the target's engine takes at most 16 draft tokens a step, got 17 ({where})"
    assert refusal(external, speculation="draft_model", **inputs) == words


def test_prompt_beyond_the_engine_s_input_is_refused_naming_the_largest(external: RequestBuilder) -> None:
    assert built(external, text_input="a" * 40, max_tokens=1).limits.max_positions == 41
    assert "has 41 tokens, at most 40 allowed" in refusal(external, text_input="a" * 41)
    assert "max_tokens must be in 1..2 after a prompt of 39 tokens" in refusal(external, text_input="a" * 39)


@pytest.mark.parametrize("mode", BUILD_MODES)
def test_internal_method_needs_no_drafter_and_asks_the_engine(checkpoint: Path, tmp_path: Path, mode: str) -> None:
    method = BUILD_MODES[mode]
    builder = replace(builder_of(checkpoint, tmp_path / "engine", mode=mode), drafters=frozenset())
    job = built(builder)
    assert job.plan.method == method and job.plan.declaration == METHODS[method].engine_side
    proposer = job.plan.proposer(ProposerDependencies(_no_client, 64))
    budget = job.limits.budget(Context(job.prompt))
    assert proposer.propose(Context(job.prompt), job.sampling, budget).tree.num_nodes == 0
    assert proposer.needs == StepOptions(engine_speculation=EngineSpeculation(8))
    chains = [name for name in PROPOSED if METHODS[name].needs_only_tokens]
    assert built(builder, speculation="none").plan.declaration is METHODS["none"]
    for other in (*(set(chains) - {"auto"}), "eagle2", *({"medusa", "eagle", "redrafter", "lookahead"} - {method})):
        predicted = {"draft_text": "ab"} if other == "predicted" else {}
        assert refusal(builder, speculation=other, **predicted).startswith(f"{WORDS}the method {other!r}: it drafts by")


@pytest.mark.parametrize("mode", BUILD_MODES)
def test_default_method_that_the_engine_lacks_is_refused_at_load(checkpoint: Path, tmp_path: Path, mode: str) -> None:
    builder = builder_of(checkpoint, tmp_path / "engine", mode=mode)
    with pytest.raises(
        ConfigError, match="default_speculation: the target's engine does not serve the method 'suffix'"
    ):
        replace(builder, config=builder.config.model_copy(update={"default_speculation": "suffix"}))


@pytest.mark.parametrize(("engine", "is_sound"), [("tensorrt_llm", True), ("torch", False)])
def test_default_method_of_an_engine_that_drafts_needs_no_drafter_s_key(
    tmp_path: Path, engine: str, is_sound: bool
) -> None:
    (tmp_path / "serving.toml").write_text(f'target = "t"\nengine = "{engine}"\ndefault_speculation = "medusa"\n')
    if is_sound:
        assert load_config(tmp_path / "serving.toml", {}).default_speculation == "medusa"
    else:
        with pytest.raises(ConfigError, match="needs the key medusa, which is empty"):
            load_config(tmp_path / "serving.toml", {})
