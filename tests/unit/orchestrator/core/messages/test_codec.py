"""Calls and answers cross Triton unchanged; whatever else arrives is an EngineError."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.checks import check_acceptance, check_step, check_steps
from orchestrator.core.messages.codec import decode_answer, decode_call, encode_answer, encode_call, packed
from orchestrator.core.messages.context import Release
from orchestrator.core.messages.run import TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.types import Acceptance, DraftResponse, PassLoad
from tests.unit.orchestrator.core.messages.strategies import (
    MAX_NODES,
    VOCAB_SIZE,
    acceptances,
    deltas,
    full_draft,
    full_step,
    same,
    sampled_q,
    samplings,
    step_options,
    trees,
)

KEY = "secret"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_step_crosses_unchanged(data: st.DataObject) -> None:
    tree = data.draw(trees)
    q = data.draw(st.one_of(st.just(()), sampled_q(tree)))
    step = StepRequest(data.draw(deltas()), tree, data.draw(samplings), data.draw(step_options), 1000, q)
    found = decode_call(encode_call(step, KEY), KEY)
    check_step(found, VOCAB_SIZE, MAX_NODES)
    assert same(found, step)


@pytest.mark.parametrize("call", [full_step(), full_draft(), TakeSteps(2**64 - 1, 7), Release(2**64 - 1)])
def test_every_call_crosses_unchanged_and_only_with_the_key(call: Any) -> None:
    assert same(decode_call(encode_call(call, KEY), KEY), call)
    with pytest.raises(EngineError, match="only the server itself may call this model"):
        decode_call(encode_call(call, "guess"), KEY)


@settings(max_examples=50, deadline=None)
@given(acceptances())
def test_an_acceptance_crosses_unchanged(drawn: tuple[Any, Acceptance]) -> None:
    tree, acceptance = drawn
    found = decode_answer(encode_answer(acceptance), Acceptance)
    check_acceptance(found, tree)
    assert same(found, acceptance)


@settings(max_examples=30, deadline=None)
@given(st.lists(acceptances(), min_size=1, max_size=4))
def test_the_steps_of_a_sequence_cross_without_the_load_of_their_pass(drawn: list[tuple[Any, Acceptance]]) -> None:
    load = PassLoad(1, 1, 1.0, 1.0)
    steps = [Step(Proposal.of(tree, "suffix"), replace(each, load=load), 0.25, 0.5) for tree, each in drawn]
    found = decode_answer(encode_answer(steps), list[Step])
    for step, (tree, acceptance) in zip(found, drawn, strict=True):
        assert same(step.proposal, Proposal.of(tree, "suffix"))
        assert same(step.acceptance, acceptance)
        assert (step.draft_s, step.target_s) == (0.25, 0.5)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_drafters_answer_crosses_unchanged(data: st.DataObject) -> None:
    tree = data.draw(trees)
    answer = DraftResponse(tree, data.draw(sampled_q(tree)), 3)
    assert same(decode_answer(encode_answer(answer), DraftResponse), answer)


def test_a_release_is_answered_with_nothing() -> None:
    assert decode_answer(encode_answer(None), NoneType) is None


@pytest.mark.parametrize("message", [np.zeros((2, 2), np.uint8), np.zeros(4, np.int32)])
def test_another_tensor_is_no_message(message: np.ndarray) -> None:
    with pytest.raises(EngineError, match=r"must be \(n,\) uint8"):
        decode_call(message, KEY)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    message = np.frombuffer(data, np.uint8)
    with pytest.raises(EngineError):
        decode_call(message, KEY)
    with pytest.raises(EngineError):
        check_steps(decode_answer(message, list[Step]))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_gives_another_call(place: int, value: int) -> None:
    data = encode_call(full_step(), KEY).copy()
    data[place % len(data)] = value
    try:
        call = decode_call(data, KEY)
        assert isinstance(call, StepRequest)
        check_step(call, VOCAB_SIZE, MAX_NODES)
    except EngineError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("code", "data", "words"),
    [
        (1, b"", "shape is malformed"),
        (1, np.array([3, 1, 1, 1], np.int32).tobytes(), "shape is malformed"),
        (1, np.array([1, -1], np.int32).tobytes(), "shape is malformed"),
        (1, np.array([2, 5], np.int32).tobytes(), "shape is malformed"),
        (1, np.array([1, 2, 9], np.int32).tobytes(), "cannot have the shape"),
        (1, np.array([1, 2**31 - 1, 9], np.int32).tobytes(), "cannot have the shape"),
        (2, np.array([1, 1, 9], np.int32).tobytes(), "expected an array of int32"),
        (99, b"", "expected an array of int32"),
    ],
)
def test_a_broken_array_is_refused(code: int, data: bytes, words: str) -> None:
    tree = {"tokens": msgspec.msgpack.Ext(code, data), "parents": np.zeros(0, np.int32)}
    with pytest.raises(EngineError, match=words):
        decode_answer(packed([tree, [], 0]), DraftResponse)


def test_an_unknown_call_is_named() -> None:
    with pytest.raises(EngineError, match=r"unknown engine call 'train' \(allowed: verify, take, draft, release"):
        decode_call(packed([KEY, "train", None]), KEY)
