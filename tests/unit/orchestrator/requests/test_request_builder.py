"""From inputs to a job: defaults, limits, and the words in which a bad request is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given as given_examples
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError, RequestError
from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import NO_LOGITS_OPTIONS, Grammar, Rule, Sampling
from orchestrator.deployment.capabilities import Capabilities
from orchestrator.deployment.checkpoint import Checkpoint
from orchestrator.deployment.config import ServingConfig
from orchestrator.proposers.dependencies import ProposerDependencies
from orchestrator.requests.generation_request import GenerationRequest
from orchestrator.requests.inputs import MAX_TEXT_BYTES, read
from orchestrator.requests.request_builder import RequestBuilder
from orchestrator.requests.sampling_inputs import sampling_of
from orchestrator.sampling.grammar import Grammars
from tests.support.tiny_models import VOCAB_SIZE, write_byte_tokenizer

CONTEXT = 32
EOS = 0
DEPLOYMENT = ServingConfig(target="t", draft="d", max_nodes=16, default_max_tokens=8, max_tokens_limit=20)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> RequestBuilder:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    checkpoint = Checkpoint(tokenizer, VOCAB_SIZE, CONTEXT, frozenset([EOS]))
    return RequestBuilder(
        DEPLOYMENT, checkpoint, frozenset(["draft"]), Grammars(folder / "tokenizer.json", VOCAB_SIZE, [EOS])
    )


def built(builder: RequestBuilder, **inputs: Any) -> GenerationRequest:
    return builder.build(read({}, json.dumps({"text_input": "abc", **inputs})))


def refusal(builder: RequestBuilder, **inputs: Any) -> str:
    """Return the words of the refusal: one line that says where."""
    with pytest.raises(RequestError) as caught:
        given = read({}, json.dumps({"text_input": "abc", **inputs}))
        builder.timeout_ms(given)
        builder.build(given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 3000
    return str(caught.value)


# Defaults


def test_job_nothing_set_is_greedy_and_takes_the_deployment_s_defaults(builder: RequestBuilder) -> None:
    job = built(builder)
    assert job.prompt == [1, 2, 3] and job.prompt_text == "abc"
    assert job.sampling.greedy
    assert (job.sampling.top_k, job.sampling.top_p, job.sampling.min_p, job.sampling.typical_p) == (0, 1.0, 0.0, 1.0)
    assert job.limits.max_tokens == DEPLOYMENT.default_max_tokens
    assert job.limits.max_positions == CONTEXT
    assert job.stop.ids == {EOS} and job.stop.strings == ()
    assert job.plan.method == DEPLOYMENT.default_speculation
    assert not (
        job.inputs.stream
        or not job.inputs.exclude_input_in_output
        or job.inputs.return_stats
        or job.options.logprobs
        or job.options.target_tokens
    )
    assert job.inputs.cache_salt == ""
    assert builder.timeout_ms(read({}, "")) == DEPLOYMENT.request_timeout_ms


def test_job_default_max_tokens_shrinks_to_what_the_context_leaves(builder: RequestBuilder) -> None:
    assert built(builder, text_input="a" * (CONTEXT - 3)).limits.max_tokens == 3


def test_job_every_choice_arrives(builder: RequestBuilder) -> None:
    job = built(
        builder, max_tokens=5, stop_words=["x", ""], stop_ids=[7], speculation="none", stream=True, return_stats=True,
        exclude_input_in_output=False, return_log_probs=True, cache_salt="s", timeout_ms=70,
    )  # fmt: skip
    assert job.limits.max_tokens == job.stop.max_tokens == 5
    assert job.stop.strings == ("x",) and job.stop.ids == {EOS, 7}
    assert job.plan.method == "none" and job.inputs.cache_salt == "s"
    assert job.inputs.stream and job.inputs.return_stats and job.options.logprobs
    assert not job.inputs.exclude_input_in_output
    assert builder.timeout_ms(read({}, '{"timeout_ms": 70}')) == 70
    assert builder.timeout_ms(read({}, '{"timeout_ms": 0}')) == DEPLOYMENT.request_timeout_ms


def test_a_time_limit_beyond_the_operator_s_is_the_operator_s(builder: RequestBuilder) -> None:
    """The gateway sends 600 s with a request that names none: a lower limit must not refuse it."""
    config = DEPLOYMENT.model_copy(update={"max_timeout_ms": 30_000})
    bounded = RequestBuilder(config, builder.checkpoint, frozenset(), builder.grammars)
    assert bounded.timeout_ms(read({}, '{"timeout_ms": 30000}')) == 30_000
    assert bounded.timeout_ms(read({}, '{"timeout_ms": 600000}')) == 30_000
    assert bounded.timeout_ms(read({}, '{"timeout_ms": 70}')) == 70


def test_job_speculation_empty_is_the_default_method(builder: RequestBuilder) -> None:
    assert built(builder, speculation="", speculation_config="").plan.method == DEPLOYMENT.default_speculation


@pytest.mark.parametrize(("end_id", "ids"), [(7, {7}), (-1, set())])
def test_job_end_id_replaces_the_checkpoint_s_and_a_negative_one_ends_nothing(
    builder: RequestBuilder, end_id: int, ids: set[int]
) -> None:
    assert built(builder, end_id=end_id).stop.ids == ids


def test_job_stream_where_one_response_is_all_that_can_be_sent_is_refused(builder: RequestBuilder) -> None:
    unary = replace(builder, streams=False)
    assert built(unary).inputs.stream is built(unary, stream=False).inputs.stream is False
    said = refusal(unary, stream=True)
    assert "stream must be false" in said and "'speculative'" in said and "(input stream)" in said


def test_job_exclude_input_true_and_absent_are_the_same(builder: RequestBuilder) -> None:
    assert built(builder, exclude_input_in_output=True).inputs.exclude_input_in_output


# Sampling


def sampled(inputs: dict[str, Any]) -> Sampling:
    return sampling_of(read({}, json.dumps(inputs)), NO_LOGITS_OPTIONS)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, Sampling(0.0)),
        ({"top_k": 1}, Sampling(0.0, 1)),
        ({"top_k": 0}, Sampling(0.0)),
        ({"top_k": -1}, Sampling(0.0)),
        ({"top_p": 0.0}, Sampling(0.0)),
        ({"top_p": 1.0}, Sampling(0.0)),
        ({"min_p": 0.125}, Sampling(0.0, min_p=0.125)),
        ({"top_k": 2}, Sampling(1.0, 2)),
        ({"top_p": 0.5}, Sampling(1.0, top_p=0.5)),
        ({"top_k": 1, "top_p": 0.0}, Sampling(0.0, 1)),  # what langchain sends by default
        ({"temperature": 0.75}, Sampling(0.75)),
        ({"temperature": 0.0, "top_k": 5}, Sampling(0.0, 5)),
        ({"temperature": 0.0, "top_p": 0.5}, Sampling(0.0, top_p=0.5)),
        ({"temperature": 0.75, "top_k": -1, "top_p": 0.0}, Sampling(0.75)),
        ({"temperature": 100.0, "top_p": 1.0, "min_p": 1.0}, Sampling(100.0, min_p=1.0)),
    ],
)
def test_sampling_defaults(inputs: dict[str, Any], expected: Sampling) -> None:
    assert replace(sampled(inputs), seed=0) == expected


def test_sampling_penalties_and_the_like_as_given() -> None:
    inputs = {
        "temperature": 0.5, "typical_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -1.0,
        "frequency_penalty": 2.0, "min_length": 3, "rule": "typical", "typical_epsilon": 0.5, "typical_delta": 0.25,
    }  # fmt: skip
    expected = Sampling(0.5, 0, 1.0, 0.0, 0.25, 1.5, -1.0, 2.0, 3, 0.5, 0.25, rule=Rule.TYPICAL)
    assert replace(sampled(inputs), seed=0) == expected
    assert sampled({"typical_p": 0.0}).typical_p == 1.0
    assert sampled({"min_tokens": 2, "min_length": 3}).min_tokens == 2


def test_sampling_use_draft_logits_means_rejection() -> None:
    assert sampled({"use_draft_logits": True}).rule is Rule.REJECTION
    assert sampled({"use_draft_logits": True, "rule": "rejection"}).rule is Rule.REJECTION
    assert sampled({"use_draft_logits": False, "rule": ""}).rule is Rule.COUPLED


def test_job_edits_by_ids_and_by_words(builder: RequestBuilder) -> None:
    """The tokenizer of these tests has a token per byte."""
    ids = {char: builder.checkpoint.tokenizer.encode(char).ids for char in "abc"}
    (a,), (b,), (c,) = ids.values()
    logits_options = built(
        builder, logit_bias_ids=[a, 5, a], logit_bias_weights=[1.0, -2.0, 0.5], embedding_bias_words=["ab", "c"],
        embedding_bias_weights=[0.25, -1.0], bad_words=["bc", ""], allowed_token_ids=[1, 2], stop_ids=[9],
    ).sampling.logits_options  # fmt: skip
    assert dict(logits_options.bias) == {a: 1.75, 5: -2.0, b: 0.25, c: -1.0}
    assert logits_options.allowed == (1, 2) and logits_options.end_ids == (EOS, 9)
    assert (b, c) in logits_options.bad_words and all(word[-2:] == (b, c) for word in logits_options.bad_words)


def test_job_grammar_and_ends(builder: RequestBuilder) -> None:
    job = built(builder, guided_decoding_guide_type="regex", guided_decoding_guide="[ab]+")
    assert job.sampling.logits_options.grammar == Grammar("regex", "[ab]+") and job.sampling.needs_logits_processors
    assert built(builder, ignore_eos=True).stop.ids == set()
    assert built(builder, ignore_eos=True, stop_ids=[3]).sampling.logits_options.end_ids == (3,)
    assert not built(builder).sampling.needs_logits_processors


def test_job_structured_output_can_be_switched_off(builder: RequestBuilder) -> None:
    strict = replace(builder, config=DEPLOYMENT.model_copy(update={"structured_output": False}))
    said = refusal(strict, guided_decoding_guide_type="json")
    assert "guided_decoding_guide_type is not served here" in said and "structured_output = false" in said
    assert built(strict, temperature=0.5).sampling.logits_options.grammar is None


def test_job_sequences_have_seeds_of_their_own(builder: RequestBuilder) -> None:
    job = built(builder, num_return_sequences=3, seed=7)
    assert job.num_sequences == 3 and built(builder, num_return_sequences=0).num_sequences == 1
    assert [job.sampling_of(i).seed for i in range(3)] == [7, child_seed(7, 1), child_seed(7, 2)]
    assert replace(job.sampling_of(2), seed=7) == job.sampling


def test_sampling_seed_as_given_under_either_name() -> None:
    assert sampled({"seed": 2**64 - 1}).seed == 2**64 - 1
    assert sampled({"random_seed": 5}).seed == 5
    assert sampled({"seed": 0, "random_seed": 5}).seed == 0


def test_sampling_without_a_seed_draws_a_new_one() -> None:
    seeds = {sampled({}).seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**64 for seed in seeds)


@given_examples(
    st.floats(allow_nan=True), st.floats(allow_nan=True), st.floats(allow_nan=True), st.integers(-(2**31), 2**31 - 1)
)
def test_sampling_is_in_range_or_refused(temperature: float, top_p: float, min_p: float, top_k: int) -> None:
    try:
        sampling = sampled({"temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k})
    except RequestError:
        return
    assert 0 <= sampling.temperature <= 100 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1
    assert sampling.top_k >= 0


# Refusals: what, value, allowed, where


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"text_input": ""}, ["the prompt is empty", "text_input or input_ids", "at least one token"]),
        ({"text_input": "", "input_ids": []}, ["the prompt is empty"]),
        ({"input_ids": [1]}, ["text_input and input_ids exclude each other"]),
        ({"text_input": "", "input_ids": [1, VOCAB_SIZE]}, ["input_ids", "0..63", "got 64", "(input input_ids)"]),
        ({"text_input": "", "input_ids": [-1]}, ["input_ids", "0..63", "got -1"]),
        ({"text_input": "a" * CONTEXT}, ["prompt has 32 tokens", "at most 31", "context"]),
        ({"text_input": "a" * 4000}, ["prompt has 4000 tokens", "at most 31"]),
        ({"text_input": "a" * (MAX_TEXT_BYTES + 1)}, ["text_input", f"{MAX_TEXT_BYTES + 1} bytes", f"{MAX_TEXT_BYTES} al"]),
        ({"max_tokens": 0}, ["max_tokens must be in 1..20", "3 tokens", "got 0", "(input max_tokens)"]),
        ({"max_tokens": -1}, ["1..20", "got -1"]),
        ({"max_tokens": 21}, ["1..20", "got 21"]),
        ({"max_tokens": 2**31}, ["1..20", "got 2147483648"]),
        ({"text_input": "a" * 30, "max_tokens": 3}, ["1..2", "30 tokens", "got 3"]),
        ({"temperature": -1}, ["temperature must be a number in 0..100", "got -1", "(input temperature)"]),
        ({"temperature": float("nan")}, ["temperature must be a number in 0..100", "got nan"]),
        ({"temperature": float("inf")}, ["temperature must be a number in 0..100", "got inf"]),
        ({"temperature": 100.00001}, ["0..100", "got 100.00001"]),
        ({"top_p": 2}, ["top_p must be a number in 0..1", "got 2", "(input top_p)"]),
        ({"min_p": -0.5}, ["min_p must be a number in 0..1", "got -0.5"]),
        ({"seed": -1}, ["seed must be an integer in 0..18446744073709551615", "got -1", "(input seed)"]),
        ({"seed": 2**64}, ["seed must be an integer in 0..18446744073709551615", f"got {2**64}"]),
        ({"random_seed": -1}, ["random_seed must be an integer in 0..18446744073709551615", "got -1", "(input random_seed)"]),
        ({"timeout_ms": -1}, ["timeout_ms must be an integer in 0..86400000", "got -1", "(input timeout_ms)"]),
        ({"timeout_ms": 86_400_001}, ["0..86400000", "got 86400001"]),
        ({"num_draft_tokens": -1}, ["num_draft_tokens must be in 0..16", "got -1"]),
        ({"num_draft_tokens": 17}, ["num_draft_tokens must be in 0..16", "got 17"]),
        ({"stop_words": ["a"] * 65}, ["stop_words has 65 entries", "at most 64", "(input stop_words)"]),
        ({"stop_words": ["a" * 1025]}, ["stop_words", "1025 bytes", "at most 1024"]),
        ({"stop_ids": [64]}, ["stop_ids", "0..63", "got 64", "(input stop_ids)"]),
        ({"cache_salt": "s" * 1025}, ["cache_salt", "1025 bytes", "at most 1024", "(input cache_salt)"]),
        ({"speculation": "hydra"}, ["unknown method 'hydra'", "prompt_lookup", "(allowed: ", "input speculation"]),
        ({"speculation": "promptlookup"}, ["did you mean 'prompt_lookup'?"]),
        ({"speculation_config": "{"}, ["input speculation_config is not JSON"]),
        ({"speculation_config": "[1]"}, ["speculation_config must be a JSON object", "got list"]),
        ({"speculation_config": '{"draft_length": 3}'}, ["'draft_length'", "did you mean 'draft_len'?", "max_nodes"]),
        ({"beam_width": 4}, ["beam_width is not supported", "got 4", "allowed: 0, 1"]),
        ({"rule": "blok"}, ["unknown rule 'blok'", "did you mean 'block'", "allowed: block, coupled", "input rule"]),
        ({"rule": "block", "use_draft_logits": True}, ["use_draft_logits", "'rejection'", "got 'block'"]),
        (
            {"rule": "block", "speculation": "suffix"},
            ["rule 'block'", "chains alone", "'suffix' has tree true", "input rule"],
        ),
        ({"rule": "block", "speculation": "lookahead"}, ["'lookahead' has a window"]),
        (
            {"rule": "block", "speculation": "prompt_lookup", "speculation_config": '{"branches": 2}'},
            ["'prompt_lookup' has branches above 1"],
        ),
        ({"typical_epsilon": 1.5}, ["typical_epsilon must be a number in 0..1", "got 1.5"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty must be a number in 0.0099999998..100", "got 0"]),
        ({"presence_penalty": float("nan")}, ["presence_penalty must be a number in -100..100", "got nan"]),
        ({"typical_p": -0.5}, ["typical_p must be a number in 0..1", "got -0.5"]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens must be in 0..8", "got 9"]),
        ({"end_id": 64}, ["end_id", "0..63", "got 64", "(input end_id)"]),
        ({"allowed_token_ids": [1] * 65}, ["allowed_token_ids has 65 entries", "at most 64"]),
        ({"allowed_token_ids": [1, 64]}, ["allowed_token_ids", "0..63", "got 64"]),
        ({"logit_bias_ids": [64], "logit_bias_weights": [1.0]}, ["logit_bias_ids", "0..63", "got 64"]),
        ({"logit_bias_ids": [1]}, ["logit_bias_ids has 1 entries, but logit_bias_weights has 0"]),
        ({"logit_bias_ids": [1], "logit_bias_weights": [1e6]}, ["logit_bias_weights must be a list", "a number in -1000..1000"]),
        ({"logit_bias_ids": [1] * 1025}, ["logit_bias_ids has 1025 entries", "at most 1024"]),
        ({"logit_bias_ids": [1] * 1024, "logit_bias_weights": [1.0] * 1024, "embedding_bias_words": ["a"], "embedding_bias_weights": [1.0]},
         ["there are 1025 biased tokens", "at most 1024"]),
        ({"embedding_bias_words": ["a"]}, ["embedding_bias_words has 1 entries, but embedding_bias_weights has 0"]),
        ({"bad_words": ["a"] * 65}, ["bad_words has 65 entries", "at most 64"]),
        ({"num_return_sequences": 17}, ["num_return_sequences must be in 0..16", "got 17"]),
        ({"num_top_log_probs": 21}, ["num_top_log_probs must be an integer in 0..20", "got 21"]),
        ({"guided_decoding_guide_type": "xml"}, ["unknown guide type 'xml'", "json, json_schema, regex"]),
        ({"guided_decoding_guide": "a+"}, ["unknown guide type ''", "regex"]),
        ({"guided_decoding_guide_type": "regex"}, ["'regex' needs guided_decoding_guide"]),
        (
            {"guided_decoding_guide_type": "json", "guided_decoding_guide": "{}"},
            ["'json' takes no guided_decoding_guide"],
        ),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(a"}, ["guided_decoding_guide"]),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+", "min_tokens": 2},
            ["min_tokens and a grammar exclude each other"],
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+", "ignore_eos": True},
            ["a grammar needs an end", "ignore_eos"],
        ),
    ],
)  # fmt: skip
def test_job_bad_input_says_what_value_allowed_and_where(
    builder: RequestBuilder, inputs: dict[str, Any], words: list[str]
) -> None:
    said = refusal(builder, **inputs)
    assert all(word in said for word in words), said


def test_job_without_any_input_is_an_empty_prompt(builder: RequestBuilder) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        builder.build(read({}, ""))


def test_job_prompt_that_fills_the_context_but_one_leaves_one_token(builder: RequestBuilder) -> None:
    assert built(builder, text_input="a" * (CONTEXT - 1)).limits.max_tokens == 1
    assert "1..1" in refusal(builder, text_input="a" * (CONTEXT - 1), max_tokens=2)


def test_job_input_ids_are_the_prompt_and_its_text_is_decoded(builder: RequestBuilder) -> None:
    job = built(builder, text_input="", input_ids=[3, 2, 1], exclude_input_in_output=False)
    assert (job.prompt, job.prompt_text) == ([3, 2, 1], "cba")


def test_job_ids_are_counted_before_each_is_looked_at_and_decoded_only_for_who_reads_the_text(
    builder: RequestBuilder,
) -> None:
    assert built(builder, text_input="", input_ids=[3, 2, 1]).prompt_text == ""
    said = refusal(builder, text_input="", input_ids=[-1] * CONTEXT)
    allowed = f"at most {CONTEXT - 1} allowed (context of the target, input input_ids)"
    assert said == f"the prompt has {CONTEXT} tokens, {allowed}"
    assert "already end the output" in refusal(builder, max_tokens=2, generated_ids=[-1] * 3)


def test_job_text_that_the_tokenizer_knows_and_the_model_does_not_is_refused(builder: RequestBuilder) -> None:
    """A tokenizer may have more entries than the model has embeddings."""
    small = replace(builder, checkpoint=Checkpoint(builder.checkpoint.tokenizer, 10, CONTEXT, frozenset()))
    assert built(small).prompt == [1, 2, 3]
    assert "0..9, got 26" in refusal(small, text_input="z")


# The method


def test_job_num_draft_tokens_is_the_draft_length_and_the_json_goes_before_it(builder: RequestBuilder) -> None:
    assert built(builder, num_draft_tokens=5).plan.config.draft_len == 5
    assert built(builder, num_draft_tokens=5, speculation_config='{"draft_len": 2}').plan.config.draft_len == 2
    assert built(builder, num_draft_tokens=0).plan.config.draft_len == 128
    assert built(builder, num_draft_tokens=0, speculation="prompt_lookup").plan.config.draft_len == 20
    assert built(builder, num_draft_tokens=5, speculation="none").plan.method == "none"


def test_job_max_nodes_is_the_smaller_of_the_deployment_s_and_the_request_s(builder: RequestBuilder) -> None:
    for asked, allowed in ((None, 16), (3, 3), (0, 0), (100, 16)):
        job = built(builder, **({} if asked is None else {"speculation_config": json.dumps({"max_nodes": asked})}))
        assert job.limits.budget(Context(job.prompt)).max_nodes == allowed


def test_job_drafter_that_is_not_loaded_is_refused_with_its_key(builder: RequestBuilder) -> None:
    assert built(builder, speculation="draft_model").plan.method == "draft_model"
    said = refusal(replace(builder, drafters=frozenset()), speculation="draft_model")
    assert "'draft_model' needs the drafter 'draft'" in said and "key draft in the deployment file" in said


def test_job_prediction_is_read_and_chooses_its_method(builder: RequestBuilder) -> None:
    for inputs in ({"draft_text": "bcd"}, {"draft_input_ids": [2, 3, 4]}):
        assert built(builder, **inputs).prediction == (2, 3, 4)
        assert built(builder, **inputs).plan.method == "auto"
        assert built(with_default(builder, "suffix"), **inputs).plan.method == "predicted"
        assert built(builder, speculation="predicted", **inputs).plan.method == "predicted"
    assert built(builder, draft_text="", draft_input_ids=[]).plan.method == DEPLOYMENT.default_speculation


def with_default(builder: RequestBuilder, method: str) -> RequestBuilder:
    return replace(builder, config=DEPLOYMENT.model_copy(update={"default_speculation": method}))


def test_auto_drafts_chains_where_a_rule_or_an_engine_takes_no_trees(builder: RequestBuilder) -> None:
    chains = replace(builder, capabilities=Capabilities(trees=False))
    for name in ("", "auto"):
        assert not built(builder, speculation=name).plan.config.is_chain
        for plan in (built(builder, speculation=name, rule="block").plan, built(chains, speculation=name).plan):
            assert plan.config.is_chain
            assert json.loads(plan.config_json) == {"tree": False}  # the target's process builds the same proposer
    asked = {"speculation": "auto", "speculation_config": '{"tree": true}'}
    assert "'auto' has tree true" in refusal(builder, **asked, rule="block")
    assert "'auto' with tree true" in refusal(chains, **asked)


def test_auto_is_the_engines_own_method_where_the_engine_takes_no_drafts(builder: RequestBuilder) -> None:
    for own, served in (("medusa", "medusa"), ("", "none")):
        engine = replace(builder, capabilities=Capabilities(drafts=False, max_nodes=0, engine_method=own))
        assert built(engine).plan.method == built(engine, speculation="auto").plan.method == served
        assert "does not serve the method 'auto'" in refusal(engine, draft_text="b")


def test_job_prediction_is_refused_when_it_cannot_be_used(builder: RequestBuilder) -> None:
    assert "exclude each other" in refusal(builder, draft_text="b", draft_input_ids=[2])
    assert "needs the expected output: draft_text or draft_input_ids" in refusal(builder, speculation="predicted")
    assert "for the methods 'predicted' and 'auto', got 'none'" in refusal(builder, speculation="none", draft_text="b")
    assert f"draft_input_ids must have ids in 0..{VOCAB_SIZE - 1}, got {VOCAB_SIZE}" in refusal(
        builder, draft_input_ids=[VOCAB_SIZE]
    )
    assert "draft_text has" in refusal(builder, draft_text="b" * (MAX_TEXT_BYTES + 1))
    for inputs in ({"draft_text": "b" * (CONTEXT + 1)}, {"draft_input_ids": [2] * (CONTEXT + 1)}):
        said = refusal(builder, **inputs)
        assert f"has {CONTEXT + 1} tokens, at most {CONTEXT} allowed" in said
    assert len(built(builder, draft_input_ids=[2] * CONTEXT).prediction) == CONTEXT


@pytest.mark.parametrize("method", ["magic", "draft_model", "predicted"])
def test_builder_default_method_that_no_request_could_use_fails_at_load(builder: RequestBuilder, method: str) -> None:
    with pytest.raises(ConfigError, match="default_speculation"):
        RequestBuilder(
            DEPLOYMENT.model_copy(update={"default_speculation": method}),
            builder.checkpoint,
            frozenset(),
            builder.grammars,
        )


# Whatever comes in

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text("aé{:[}0", max_size=8)
names = st.sampled_from(
    ["text_input", "input_ids", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "random_seed", "stop_words",
     "stop_ids", "end_id", "speculation", "speculation_config", "num_draft_tokens", "timeout_ms", "stream", "cache_salt",
     "return_stats", "rule", "pad_id", "bad_words", "lora_config", "tempratur", "draft_text", "draft_input_ids"]
)  # fmt: skip


@given_examples(inputs=st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=4))
def test_job_any_parameters_give_a_job_or_a_refusal(builder: RequestBuilder, inputs: dict[str, Any]) -> None:
    """Nothing but RequestError ever comes out; a job that comes out can be run."""
    try:
        given = read({}, json.dumps({"text_input": "abc"} | inputs))
        assert 0 < builder.timeout_ms(given) <= 86_400_000
        job = builder.build(given)
    except RequestError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert 0 < len(job.prompt) < CONTEXT and 0 < job.limits.max_tokens <= CONTEXT - len(job.prompt)
    job.plan.proposer(ProposerDependencies(lambda name: None, VOCAB_SIZE, job.prediction))  # type: ignore[arg-type, return-value]


# A text that another server began

DEMO = Tokenizer.from_file("models/target/tokenizer.json")
BEGUN = "one 漢字 two, then 🙂 three ends here"


@pytest.mark.parametrize("stops", [(), ("two, th",), ("🙂 t",), ("ends!", "here!")])
def test_a_text_continued_after_any_token_gets_the_rest_of_its_text(
    builder: RequestBuilder, stops: tuple[str, ...]
) -> None:
    """Whichever tokens came before: characters in the middle and stop strings that have begun are completed."""
    ids = DEMO.encode(BEGUN).ids

    def parts(generated: list[int]) -> tuple[list[str], str | None]:
        job = built(builder)
        job = replace(job, inputs=job.inputs.model_copy(update={"generated_ids": tuple(generated)}), prompt=[5])
        job = replace(job, stop=replace(job.stop, max_tokens=len(ids), ids=frozenset(), strings=stops))
        output = job.sequence(0, DEMO).output
        return [output.push([token]).text for token in ids[len(generated) :] if not output.finish], output.finish

    whole, finish = parts([])
    for num_generated in range(1, len(whole)):
        assert parts(ids[:num_generated]) == (whole[num_generated:], finish)


def test_a_continued_text_counts_as_output(builder: RequestBuilder) -> None:
    job = built(builder, generated_ids=[7, 8], max_tokens=5)
    sequence = job.sequence(0, builder.checkpoint.tokenizer)

    assert sequence.context.ids == [1, 2, 3, 7, 8] and sequence.context.prompt_len == 3
    assert sequence.output.num_tokens == 2 and sequence.limits.budget(sequence.context).max_depth == 2


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"generated_ids": [99]}, "generated_ids must have ids in 0..63"),
        ({"generated_ids": [5], "num_return_sequences": 2}, "generated_ids continue one sequence"),
        ({"generated_ids": [5], "exclude_input_in_output": False}, "generated_ids continue one sequence"),
        ({"sequence_index": -1}, "sequence_index"),
        ({"stream_steps": True}, "stream_steps needs stream"),
        ({"stream": True, "stream_steps": True, "return_steps": True}, "stream_steps and return_steps exclude"),
    ],
)
def test_what_cannot_be_continued_is_refused(builder: RequestBuilder, inputs: dict[str, Any], words: str) -> None:
    assert words in refusal(builder, **inputs)


@pytest.mark.parametrize(
    ("generated", "why"), [([5, EOS, 6], "stop at token 2 of 3"), ([5] * 8, "length at token 8 of 8")]
)
def test_output_that_has_ended_is_not_continued(builder: RequestBuilder, generated: list[int], why: str) -> None:
    with pytest.raises(RequestError, match=f"already end the output: {why}"):
        built(builder, generated_ids=generated).sequence(0, builder.checkpoint.tokenizer)


def test_sequence_index_has_the_seed_of_that_sequence(builder: RequestBuilder) -> None:
    assert built(builder, seed=3, sequence_index=2).sampling_of(0).seed == child_seed(3, 2)
    assert built(builder, seed=3, sequence_index=2).sampling_of(1).seed == child_seed(3, 3)
    assert built(builder, seed=3).sampling_of(0).seed == 3
