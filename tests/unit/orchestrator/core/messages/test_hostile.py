"""A hostile or broken peer: whatever it sends, a reader of the wire returns a value or raises a ServingError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import EngineError, ServingError
from orchestrator.core.messages.context import delta_of, pack_release, released_sequence
from orchestrator.core.messages.drafter import (
    DraftRequest,
    pack_draft_request,
    pack_draft_response,
    unpack_draft_request,
    unpack_draft_response,
)
from orchestrator.core.messages.message import MAX_HEADER_BYTES, decode, encode
from orchestrator.core.messages.run import RunOptions, TakeSteps, pack_steps, pack_take, unpack_steps
from orchestrator.core.messages.target import StepRequest, pack_acceptance, pack_step, unpack_acceptance, unpack_call
from orchestrator.core.messages.tensors import Tensors
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import (
    Acceptance,
    DraftResponse,
    EngineSpeculation,
    EngineSpeculationResult,
    HeadInput,
    HiddenStates,
    StepOptions,
)
from tests.unit.orchestrator.core.messages.strategies import MAX_NODES, VOCAB_SIZE, full_step, ids_of

CONTEXT, TREE = Context([1, 2, 3]), TokenTree.from_paths([[4, 5], [6]])
OPTIONS = LogitsOptions(((1, 2.0),), Grammar("json", ""), (1, 2), ((3, 4),), (0,))
FEATURES = np.ones((2, 3), np.float32)


def _step() -> Tensors:
    options = StepOptions(True, True, 0, 3, HiddenStates.LAST, EngineSpeculation(4, ((0,), (1,)), (4, 3, 4)))
    run = RunOptions("suffix", "{}", Limits(8, 64, 16), 0, (0,), (5, 6))
    delta = delta_of(CONTEXT, 1, 9, "salt")
    return pack_step(StepRequest(delta, TREE, Sampling(0.5, logits_options=OPTIONS), options, 1000, (), run, 40))


def _draft() -> Tensors:
    head = HeadInput(FEATURES, 0, TokenTree.from_paths([[0, 1]]), 2, 0.5)
    return pack_draft_request(DraftRequest(delta_of(CONTEXT, 0, 9, ""), Sampling(), 4, 4, head, 100))


def _acceptance() -> Acceptance:
    tops = np.zeros((3, 2), np.int32), np.zeros((3, 2))
    node_tops = np.zeros((4, 2), np.int32)
    return Acceptance((1, 2), 7, np.zeros(4, np.int32), np.zeros(3), *tops, FEATURES, node_top_ids=node_tops)


def _answer() -> Tensors:
    spoken = Acceptance((), 7, engine_speculation=EngineSpeculationResult("medusa", (5,), (2,), 3))
    return pack_acceptance(_acceptance()) | pack_acceptance(spoken)


def _steps() -> Tensors:
    return pack_steps([Step(Proposal.of(TREE, "suffix"), _acceptance(), 0.0, 0.0)])


#: Each reader, with what a friendly peer sends it.
READERS: dict[str, tuple[Tensors, Callable[[Tensors], Any]]] = {
    "step": (_step(), lambda tensors: unpack_call(tensors, VOCAB_SIZE, MAX_NODES)),
    "take": (pack_take(TakeSteps(9, 3)), lambda tensors: unpack_call(tensors, VOCAB_SIZE, MAX_NODES)),
    "release": (pack_release(9), released_sequence),
    "acceptance": (_answer(), lambda tensors: unpack_acceptance(tensors, TREE)),
    "steps": (_steps(), unpack_steps),
    "draft": (_draft(), unpack_draft_request),
    "drafted": (
        pack_draft_response(DraftResponse(TREE, (), 3)),
        lambda tensors: unpack_draft_response(tensors, VOCAB_SIZE, MAX_NODES),
    ),
}

DTYPES = st.sampled_from(["bool", "int8", "int32", "int64", "uint8", "uint64", "float16", "float32", "float64"])
#: Numbers that break arithmetic: the ends of the types, NaN and infinity come from hypothesis itself.
random_numbers = DTYPES.flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
texts = st.one_of(st.binary(max_size=9), st.sampled_from([b"fair", b"coupled", b"json", b"{", "é".encode()]))
random_texts = st.lists(st.one_of(texts, st.integers(), st.none(), st.text(max_size=3)), max_size=3).map(
    lambda values: np.array(values, np.object_)
)
long_ids = st.integers(10_000, 100_000).map(lambda length: np.zeros(length, np.int32))
small_ids = st.lists(st.integers(-2, 60), max_size=12).map(lambda values: np.array(values, np.int32))
any_tensor = st.one_of(random_numbers, small_ids, random_texts, long_ids)


@pytest.mark.parametrize("reader", READERS)
def test_a_friendly_peer_is_understood(reader: str) -> None:
    tensors, read = READERS[reader]
    read(tensors)
    read(decode(encode(tensors)))


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_hostile_peer_gets_a_serving_error(reader: str, data: st.DataObject) -> None:
    friendly, read = READERS[reader]
    tensors = dict(friendly)
    for name in data.draw(st.lists(st.sampled_from(sorted(friendly)), min_size=1, max_size=4, unique=True)):
        tensors[name] = data.draw(any_tensor, label=name)
        if data.draw(st.booleans(), label=f"without {name}"):
            del tensors[name]
    try:
        read(tensors)
    except ServingError as error:
        assert str(error)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read(data: bytes) -> None:
    try:
        decode(np.frombuffer(data, np.uint8))
    except EngineError as error:
        assert "message" in str(error)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"a:int32:" + b",".join([b"1"] * 40) + b";", "dimensions"),
        (b"a:int32:0,99999999999999999999;", "shape"),
        (b"a:int32:" + b"9" * 5000 + b";", "malformed"),
        (b"a" * MAX_HEADER_BYTES + b":int32:1;", "header of"),
    ],
    ids=["dimensions", "length", "digits", "header"],
)
def test_a_header_that_would_break_numpy_or_memory_is_refused(header: bytes, words: str) -> None:
    header += b" " * (-(4 + len(header)) % 8)
    with pytest.raises(EngineError, match=words):
        decode(np.frombuffer(len(header).to_bytes(4, "little") + header + bytes(64), np.uint8))


@pytest.mark.parametrize(
    ("reader", "change", "words"),
    [
        ("step", {"cache_salt": np.array([], np.object_)}, "cache_salt.*one text"),
        ("step", {"cache_salt": np.array([b"\xff"], np.object_)}, "cache_salt.*UTF-8"),
        ("release", {"release": np.array([], np.bool_)}, "release"),
        ("step", {"context_start": ids_of(-3)}, "context_start must be in 0.."),
        ("step", {"allowed_ids": ids_of(VOCAB_SIZE)}, "allowed_ids has an id outside 0..49"),
        ("step", {"bias_weights": np.array([np.nan], np.float32)}, "bias_weights"),
        ("step", {"sampling": full_step()["sampling"] - 1}, "temperature must be"),
        ("steps", {"steps": ids_of()}, "steps must have rows of 10"),
        ("steps", {"node_sources": ids_of(0, 0, 1)}, "node_sources has an id outside 0..0"),
        ("steps", {"path": ids_of(1, 3)}, "not a path of the tree"),
        ("steps", {"logprobs": np.zeros((3, 1))}, "logprobs.*3 rows"),
        ("acceptance", {"top_logprobs": np.zeros((3, 1))}, "the same shape"),
        ("acceptance", {"node_top_ids": np.zeros((3, 2), np.int32)}, "node_top_ids.*4 rows"),
        ("acceptance", {"node_top_ids": np.zeros((4, 2), np.float32)}, "node_top_ids.*int32"),
        ("acceptance", {"next_token": ids_of(-1)}, "next_token"),
        ("draft", {"min_prob": np.array([np.nan])}, "min_prob"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_what_a_reader_says(reader: str, change: Tensors, words: str) -> None:
    tensors, read = READERS[reader]
    with pytest.raises(EngineError, match=words):
        read(tensors | change)
