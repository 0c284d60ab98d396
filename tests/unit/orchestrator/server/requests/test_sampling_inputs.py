"""Sampling parameters, edits of the logits and seeds, as a request gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given as given_examples
from hypothesis import strategies as st

from orchestrator.core.errors import RequestError
from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import NO_LOGITS_OPTIONS, Grammar, Sampling
from orchestrator.server.inputs import read
from orchestrator.server.request_builder import RequestBuilder
from orchestrator.server.sampling_inputs import sampling_of
from tests.support.request_building import EOS, built


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


def test_job_sequences_have_seeds_of_their_own(builder: RequestBuilder) -> None:
    job = built(builder, num_return_sequences=3, seed=7)
    assert job.num_sequences == 3 and built(builder, num_return_sequences=0).num_sequences == 1
    assert [job.sampling_of(i).seed for i in range(3)] == [7, child_seed(7, 1), child_seed(7, 2)]
    assert replace(job.sampling_of(2), seed=7) == job.sampling


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
