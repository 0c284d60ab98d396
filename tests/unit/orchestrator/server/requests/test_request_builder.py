"""From inputs to a request: defaults, limits, and the words in which a bad request is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given as given_examples
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.core.deployment.checkpoint import Checkpoint
from orchestrator.core.errors import RequestError
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.server.inputs import MAX_TEXT_BYTES, read
from orchestrator.server.request_builder import RequestBuilder
from tests.support.request_building import CONTEXT, DEPLOYMENT, EOS, built, refusal
from tests.support.tiny_models import VOCAB_SIZE


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


def test_a_stop_word_that_names_a_special_token_is_that_token(builder: RequestBuilder) -> None:
    """Chat front ends stop at the end of a turn by its name, and a special token has no text to search."""
    tokenizer = Tokenizer.from_str(builder.checkpoint.tokenizer.to_str())
    tokenizer.add_special_tokens(["<|im_end|>", "<|beyond|>"])
    tokenizer.add_tokens(["<think>"])
    end = tokenizer.token_to_id("<|im_end|>")
    checkpoint = replace(builder.checkpoint, tokenizer=tokenizer, vocab_size=end + 1)
    named = built(
        replace(builder, checkpoint=checkpoint), stop_words=["<|im_end|>", "<|beyond|>", "<think>"], ignore_eos=True
    )
    assert named.stop.ids == {end}, "a word that is text, or an id that the model lacks, is only searched for"
    assert named.stop.strings == ("<|im_end|>", "<|beyond|>", "<think>")


def test_a_number_of_a_tensor_is_named_as_the_client_wrote_it() -> None:
    with pytest.raises(RequestError, match=r"got -0\.1 \(input temperature\)"):
        read({"temperature": np.array([-0.1], np.float32)}, "")


def test_a_time_limit_beyond_the_operator_s_is_the_operator_s(builder: RequestBuilder) -> None:
    """The gateway sends 600 s with a request that names none: a lower limit must not refuse it."""
    config = DEPLOYMENT.model_copy(update={"max_timeout_ms": 30_000})
    bounded = RequestBuilder(config, builder.checkpoint, frozenset(), builder.grammars)
    assert bounded.timeout_ms(read({}, '{"timeout_ms": 30000}')) == 30_000
    assert bounded.timeout_ms(read({}, '{"timeout_ms": 600000}')) == 30_000
    assert bounded.timeout_ms(read({}, '{"timeout_ms": 70}')) == 70


@pytest.mark.parametrize(
    ("inputs", "most"),
    [
        ({"input_ids": [1, 2, 3], "max_tokens": 4}, 7),
        ({"input_ids": [1, 2, 3]}, 3 + DEPLOYMENT.default_max_tokens),
        ({"text_input": "a" * 8, "max_tokens": 4}, 2 + 4),
        ({"text_input": "\N{SNOWMAN}" * 3, "max_tokens": 4}, 3 + 4),
        ({"text_input": "", "max_tokens": -(2**31)}, 0),
        ({"text_input": "a" * 1000, "max_tokens": 4}, CONTEXT),
        ({"input_ids": [1], "max_tokens": 2**31 - 1}, CONTEXT),
    ],
)
def test_tokens_that_a_sequence_may_come_to_are_known_before_the_request_is_checked(
    builder: RequestBuilder, inputs: dict[str, Any], most: int
) -> None:
    assert builder.most_tokens(read({}, json.dumps(inputs))) == most


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


def test_job_prompt_that_fills_the_context_but_one_leaves_one_token(builder: RequestBuilder) -> None:
    assert built(builder, text_input="a" * (CONTEXT - 1)).limits.max_tokens == 1
    assert "1..1" in refusal(builder, text_input="a" * (CONTEXT - 1), max_tokens=2)


def test_job_input_ids_are_the_prompt_and_its_text_is_decoded(builder: RequestBuilder) -> None:
    job = built(builder, text_input="", input_ids=[3, 2, 1], exclude_input_in_output=False)
    assert (job.prompt, job.prompt_text) == ([3, 2, 1], "cba")


def test_job_text_that_the_tokenizer_knows_and_the_model_does_not_is_refused(builder: RequestBuilder) -> None:
    """A tokenizer may have more entries than the model has embeddings."""
    small = replace(builder, checkpoint=Checkpoint(builder.checkpoint.tokenizer, 10, CONTEXT, frozenset()))
    assert built(small).prompt == [1, 2, 3]
    assert "0..9, got 26" in refusal(small, text_input="z")


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
