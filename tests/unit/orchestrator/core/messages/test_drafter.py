"""Drafter calls and their answers: they survive the wire, and invalid ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.context import Delta
from orchestrator.core.messages.drafter import (
    DraftRequest,
    pack_draft_request,
    pack_draft_response,
    unpack_draft_request,
    unpack_draft_response,
)
from orchestrator.core.messages.target import unpack_step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse
from tests.unit.orchestrator.core.messages.strategies import (
    MAX_NODES,
    VOCAB_SIZE,
    crossed,
    deltas,
    full_draft,
    full_step,
    same,
    sampled_q,
    samplings,
    trees,
)


@settings(max_examples=60, deadline=None)
@given(deltas(), samplings, st.integers(0, 128), st.integers(0, 128))
def test_unpacked_draft_request_equals_the_packed_one(
    delta: Delta, sampling: Sampling, max_nodes: int, max_depth: int
) -> None:
    request = DraftRequest(delta, sampling, max_nodes, max_depth)
    assert same(request, unpack_draft_request(crossed(pack_draft_request(request))))


@settings(max_examples=50, deadline=None)
@given(trees, st.integers(0, 1000), st.data())
def test_unpacked_draft_response_equals_the_packed_one(tree: TokenTree, cached_len: int, data: st.DataObject) -> None:
    q = data.draw(st.one_of(st.just(()), sampled_q(tree)))
    back = unpack_draft_response(
        crossed(pack_draft_response(DraftResponse(tree, q, cached_len))), VOCAB_SIZE, MAX_NODES
    )
    assert same(tree, back.tree) and same(q, back.q) and back.cached_len == cached_len


@pytest.mark.parametrize("lack", ["absent", "empty"])
@pytest.mark.parametrize("name", ["sequence_id", "sampling", "deadline_ms", "max_nodes", "max_depth"])
def test_missing_tensor_is_named(name: str, lack: str) -> None:
    unpack, tensors = (
        (lambda t: unpack_step(t, VOCAB_SIZE, MAX_NODES), full_step())
        if name == "deadline_ms"
        else (unpack_draft_request, full_draft())
    )
    if lack == "absent":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:0]
    with pytest.raises(EngineError, match=name):
        unpack(tensors)
