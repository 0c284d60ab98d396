"""The wire: what is packed comes back the same, and what breaks a law is refused before it does harm."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.context import Context
from orchestrator.core.errors import (
    ConfigError,
    EngineError,
    EngineLost,
    RequestError,
    ServingError,
    Unavailable,
    UnknownSequence,
)
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import (
    Acceptance,
    Distribution,
    DraftResponse,
    EngineSpeculation,
    EngineSpeculationResult,
    HiddenStates,
    StepOptions,
)
from orchestrator.wire.context import Delta, delta_of, pack_release, released_sequence
from orchestrator.wire.drafter import (
    DraftRequest,
    pack_draft_request,
    pack_draft_response,
    unpack_draft_request,
    unpack_draft_response,
)
from orchestrator.wire.target import StepRequest, pack_acceptance, pack_step, unpack_acceptance, unpack_step
from orchestrator.wire.tensors import Tensors, error_from, error_text
from orchestrator.wire.tree import unpack_tree

VOCAB_SIZE = 50
MAX_NODES = 16

float32s = st.floats(0.0, 1.0, width=32)
token_ids = st.integers(0, VOCAB_SIZE - 1)
trees = st.lists(st.lists(token_ids, max_size=4), max_size=4).map(TokenTree.from_paths)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.0, 10.0, width=32),
    top_k=st.integers(0, 300_000),
    top_p=float32s,
    min_p=float32s,
    typical_p=float32s,
    repetition_penalty=st.floats(0.5, 2.0, width=32),
    presence_penalty=st.floats(-2.0, 2.0, width=32),
    frequency_penalty=st.floats(-2.0, 2.0, width=32),
    min_tokens=st.integers(0, 4096),
    epsilon=float32s,
    delta=float32s,
    seed=st.integers(0, 2**64 - 1),
    rule=st.sampled_from(Rule),
    logits_options=st.builds(
        LogitsOptions,
        bias=st.lists(st.tuples(token_ids, st.floats(-100, 100, width=32)), max_size=3).map(tuple),
        grammar=st.one_of(st.none(), st.builds(Grammar, st.sampled_from(["json", "regex"]), st.text(max_size=9))),
        allowed=st.lists(token_ids, max_size=3).map(tuple),
        bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        end_ids=st.lists(token_ids, max_size=2).map(tuple),
    ),
)
insides = st.builds(
    EngineSpeculation,
    st.integers(1, 4096),
    st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    st.sampled_from([(), (4, 3, 4), (1, 1, 0)]),
)
features = st.one_of(
    st.just((None, HiddenStates.NONE)),
    st.tuples(
        st.integers(0, 100_000),
        st.sampled_from([HiddenStates.LAST, HiddenStates.LAYERS, HiddenStates.LAST | HiddenStates.LAYERS]),
    ),
)
step_options = st.builds(
    lambda flags, features, num_top, engine_speculation: StepOptions(
        *flags, features[0], num_top, features[1], engine_speculation
    ),
    st.tuples(st.booleans(), st.booleans()),
    features,
    st.integers(0, 20),
    st.one_of(st.none(), insides),
)
lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)
bursts = lengths.flatmap(
    lambda lengths: st.builds(
        EngineSpeculationResult,
        st.sampled_from(["medusa", "lookahead"]),
        st.lists(token_ids, min_size=sum(lengths) - 1, max_size=sum(lengths) - 1).map(tuple),
        st.just(tuple(lengths)),
        st.integers(0, 500),
    )
)


@st.composite
def drawn(draw: st.DrawFn, tree: TokenTree) -> tuple[Distribution, ...]:
    """A q for every node, that of its siblings, which holds its token."""
    by_parent: dict[int, Distribution] = {}
    for parent, children in enumerate(tree.children):
        ids = sorted({*children, *draw(st.lists(token_ids, max_size=4))})
        weights = draw(st.lists(st.floats(2.0**-60, 1.0, width=32), min_size=len(ids), max_size=len(ids)))
        by_parent[parent] = Distribution(np.array(ids, np.int32), np.array(weights, np.float32))
    return tuple(by_parent[parent] for parent in tree.parents.tolist())


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    context = Context(draw(st.lists(token_ids, min_size=1, max_size=20)))
    start = draw(st.integers(0, len(context) - 1))
    salt = draw(st.text(max_size=5))
    return delta_of(context, start, draw(st.integers(1, 2**64 - 1)), salt)


@st.composite
def acceptances(draw: st.DrawFn) -> tuple[TokenTree, Acceptance]:
    """A tree and what a target may say of it."""
    tree = draw(trees)
    path: list[int] = []
    while (below := list(tree.children[path[-1] if path else 0].values())) and draw(st.booleans()):
        path.append(draw(st.sampled_from(below)))
    rows = draw(st.integers(0, 4))
    return tree, Acceptance(
        tuple(path),
        draw(token_ids),
        target_tokens=draw(st.sampled_from([None, np.arange(tree.num_nodes + 1, dtype=np.int32)])),
        logprobs=draw(st.sampled_from([None, -np.linspace(1e-12, 40.0, len(path) + 1)])),
        top_ids=(top := draw(st.sampled_from([None, np.zeros((len(path) + 1, 2), np.int32)]))),
        top_logprobs=None if top is None else np.full((len(path) + 1, 2), -0.1),
        features=np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) if rows else None,
        features_start=draw(st.integers(0, 1000)) if rows else 0,
        forward_us=draw(st.integers(0, 10**9)),
        num_in_pass=draw(st.integers(1, 500)),
        num_cached_tokens=draw(st.integers(0, 10**6)),
        engine_speculation=None if path else draw(st.one_of(st.none(), bursts)),
    )


def same(left: Any, right: Any) -> bool:
    """Equality of the wire's nouns, arrays by dtype and content."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def crossed(tensors: Tensors) -> Tensors:
    """What Triton makes of tensors: flat, contiguous copies of declared types; none may be empty."""
    assert all(tensor.size for tensor in tensors.values()), "empty tensors are omitted"
    assert {t.dtype for t in tensors.values()} <= {
        np.dtype(kind) for kind in (np.int32, np.uint64, np.float32, np.float64, np.bool_, np.object_)
    }
    return {name: tensor.copy() for name, tensor in tensors.items()}


@settings(max_examples=100, deadline=None)
@given(deltas(), trees, samplings, step_options, st.integers(1, 10**7), st.data())
def test_a_step_comes_back_the_same(
    delta: Delta, tree: TokenTree, sampling: Sampling, options: StepOptions, deadline_ms: int, data: st.DataObject
) -> None:
    q = data.draw(st.one_of(st.just(()), drawn(tree)))
    request = StepRequest(delta, tree, sampling, options, deadline_ms, q)
    back = unpack_step(crossed(pack_step(request)), VOCAB_SIZE, MAX_NODES)
    assert same(request, back)
    assert back.delta.prefix_len == delta.prefix_len


@settings(max_examples=60, deadline=None)
@given(deltas(), samplings, st.integers(0, 128), st.integers(0, 128))
def test_a_draft_call_comes_back_the_same(delta: Delta, sampling: Sampling, max_nodes: int, max_depth: int) -> None:
    request = DraftRequest(delta, sampling, max_nodes, max_depth)
    assert same(request, unpack_draft_request(crossed(pack_draft_request(request))))


@settings(max_examples=100, deadline=None)
@given(acceptances())
def test_an_acceptance_comes_back_the_same(case: tuple[TokenTree, Acceptance]) -> None:
    tree, acceptance = case
    assert same(acceptance, unpack_acceptance(crossed(pack_acceptance(acceptance)), tree))


@settings(max_examples=50, deadline=None)
@given(trees, st.integers(0, 1000), st.data())
def test_a_drafter_s_tree_and_q_come_back_the_same(tree: TokenTree, cached_len: int, data: st.DataObject) -> None:
    q = data.draw(st.one_of(st.just(()), drawn(tree)))
    back = unpack_draft_response(
        crossed(pack_draft_response(DraftResponse(tree, q, cached_len))), VOCAB_SIZE, MAX_NODES
    )
    assert same(tree, back.tree) and same(q, back.q) and back.cached_len == cached_len


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


@pytest.mark.parametrize(
    ("q", "words"),
    [
        ([([1], [1.0])], "1 distributions q for 2 nodes"),
        ([([1], [1.0]), ([3], [1.0])], "q of node 2 does not contain the node.s token"),
        ([([1, 2], [1.0, 0.0]), ([2], [1.0])], "q of node 1 has a weight that is not a positive number"),
        ([([1, 2], [1.0, float("nan")]), ([2], [1.0])], "q of node 1 has a weight"),
        ([([2, 1], [1.0, 1.0]), ([2], [1.0])], "q of node 1 must have ascending ids in 0..49"),
        ([([1, 50], [1.0, 1.0]), ([2], [1.0])], "q of node 1 must have ascending ids in 0..49"),
        ([([1, 2], [1.0, 1.0]), ([1, 2], [1.0, 2.0])], "node 2 has another q than its siblings"),
    ],
)
def test_a_q_that_would_bend_the_law_is_refused(q: list[tuple[list[int], list[float]]], words: str) -> None:
    """Two children of the root, 1 and 2."""
    tree = TokenTree.from_paths([[1], [2]])
    distributions = tuple(Distribution(ids_of(*ids), np.array(weights, np.float32)) for ids, weights in q)
    delta = delta_of(Context([1, 2]), 0, 1, "")
    step = StepRequest(delta, tree, Sampling(), StepOptions(), 1000, distributions)
    with pytest.raises(EngineError, match=words):
        unpack_step(pack_step(step), VOCAB_SIZE, MAX_NODES)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rule", np.array([b"fair"], np.object_), "unknown rule 'fair'"),
        ("bias_ids", ids_of(1, 2), "2 bias_ids, but 0 bias_weights"),
        ("bad_word_lengths", ids_of(3), "bad_word_ids: lengths add up to 3, but there are 0"),
        ("bad_word_lengths", ids_of(-1), "bad_word_ids: lengths"),
    ],
)
def test_a_sampling_that_does_not_fit_is_refused(name: str, value: np.ndarray, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        unpack_draft_request(full_draft() | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "highest"),
    [("width", 2**31 - 1, 32), ("width", -5, 32), ("width", 33, 32), ("max_nodes", 129, 128), ("max_nodes", -1, 128),
     ("max_depth", 10**9, 128)],
)  # fmt: skip
def test_a_tree_larger_than_any_is_refused_before_it_is_grown(name: str, value: int, highest: int) -> None:
    with pytest.raises(EngineError, match=rf"{name} must be in 0..{highest}, got {value}"):
        unpack_draft_request(full_draft() | {name: ids_of(value)})


def test_more_rows_of_features_than_a_step_brings_are_refused() -> None:
    with pytest.raises(EngineError, match="at most 512 rows, got 513"):
        unpack_draft_request(full_draft() | {"features": np.zeros((513, 2), np.float32)})


def test_the_hash_names_the_tokens_before_the_start() -> None:
    context = Context([7, 8, 9, 10])
    delta = delta_of(context, 2, 1, "")
    assert (delta.context_start, delta.context_ids.tolist(), delta.prefix_len) == (2, [9, 10], 4)
    assert delta.context_hash == Context([7, 8]).rolling_hash(2)
    assert delta.context_hash != Context([8, 7]).rolling_hash(2)
    assert delta.context_hash != Context([0, 7, 8]).rolling_hash(3)


def test_sequence_ids_and_seeds_use_all_64_bits() -> None:
    delta = delta_of(Context([1]), 0, 2**64 - 1, "")
    tensors = pack_draft_request(DraftRequest(delta, Sampling(1.0, seed=2**64 - 2), 1, 1))
    assert tensors["sequence_id"].dtype == tensors["seed"].dtype == np.uint64
    back = unpack_draft_request(tensors)
    assert (back.delta.sequence_id, back.sampling.seed) == (2**64 - 1, 2**64 - 2)


def full_step() -> Tensors:
    delta = delta_of(Context([1, 2, 3]), 1, 9, "salt")
    tree = TokenTree.from_paths([[4, 5], [6]])
    return pack_step(
        StepRequest(delta, tree, Sampling(0.5), StepOptions(True, True, 0, hidden_states=HiddenStates.LAST), 1000)
    )


def full_draft() -> Tensors:
    delta = delta_of(Context([1, 2, 3]), 1, 9, "salt")
    return pack_draft_request(DraftRequest(delta, Sampling(0.5), 4, 4))


@pytest.mark.parametrize("lack", ["absent", "empty"])
@pytest.mark.parametrize("name", ["sequence_id", "sampling", "deadline_ms", "max_nodes", "max_depth"])
def test_what_a_call_cannot_do_without_is_named(name: str, lack: str) -> None:
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


def test_an_answer_without_a_token_is_refused() -> None:
    with pytest.raises(EngineError, match="next_token"):
        unpack_acceptance({}, TokenTree.bare())


def test_a_sampling_vector_of_another_length_is_refused() -> None:
    tensors = full_step() | {"sampling": np.ones(3, np.float32)}
    with pytest.raises(EngineError, match="temperature, top_k, top_p, min_p"):
        unpack_step(tensors, VOCAB_SIZE, MAX_NODES)


BAD_TREES = {
    "more parents than nodes": ([1, 2], [0], "must match"),
    "nodes without parents": ([1, 2], [], "must match"),
    "parents without nodes": ([], [0], "must match"),
    "a node that is its own parent": ([1, 2], [0, 2], "come before"),
    "a cycle": ([1, 2], [2, 1], "come before"),
    "a parent that comes later": ([1, 2, 3], [0, 3, 0], "come before"),
    "a parent that does not exist": ([1, 2], [0, 99], "come before"),
    "a parent below 0": ([1], [-1], "come before"),
    "an id below 0": ([-1], [0], "outside 0..49"),
    "an id beyond the vocabulary": ([50], [0], "outside 0..49"),
    "twins": ([1, 2, 1], [0, 0, 0], "same token"),
    "twins further down": ([1, 2, 3, 3], [0, 1, 2, 2], "same token"),
    "one node too many": ([*range(17)], [0] * 17, "at most 16"),
    "the largest numbers there are": ([2**31 - 1], [2**31 - 1], "outside"),
    "the smallest": ([-(2**31)], [-(2**31)], "outside"),
}


@pytest.mark.parametrize("name", BAD_TREES)
def test_garbage_is_no_tree(name: str) -> None:
    ids, parents, reason = BAD_TREES[name]
    tensors = {
        "node_ids": np.array(ids, np.int32),
        "node_parents": np.array(parents, np.int32),
    }
    with pytest.raises(EngineError, match=reason):
        unpack_tree(tensors, VOCAB_SIZE, MAX_NODES)
    with pytest.raises(EngineError, match=reason):
        unpack_step(full_step() | tensors, VOCAB_SIZE, MAX_NODES)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, VOCAB_SIZE + 1), st.integers(-2, 9)), max_size=8))
def test_what_is_let_through_obeys_the_laws(nodes: list[tuple[int, int]]) -> None:
    ids, parents = (np.array([node[i] for node in nodes], np.int32) for i in (0, 1))
    lawful = all(0 <= token < VOCAB_SIZE and 0 <= parent <= i for i, (token, parent) in enumerate(nodes)) and len(
        {(parent, token) for token, parent in nodes}
    ) == len(nodes)
    try:
        tree = unpack_tree({"node_ids": ids, "node_parents": parents}, VOCAB_SIZE, MAX_NODES)
    except EngineError:
        assert not lawful
    else:
        assert lawful
        assert sum(len(below) for below in tree.children) == tree.num_nodes


def test_a_million_nodes_are_refused_at_once() -> None:
    many = np.zeros(10**6, np.int32)
    began_s = time.monotonic()
    with pytest.raises(EngineError, match="1000000 nodes, at most 16"):
        unpack_tree({"node_ids": many, "node_parents": many}, VOCAB_SIZE, MAX_NODES)
    assert time.monotonic() - began_s < 0.5


#      0
#     / \
#    1   3      1-2 and 3-4-5 are its paths, and their beginnings
#    |   |
#    2   4-5
FORK = TokenTree.from_paths([[10, 11], [12, 13, 14]])
PATHS = {(), (1,), (1, 2), (3,), (3, 4), (3, 4, 5)}


@pytest.mark.parametrize(
    "path",
    [*sorted(PATHS), (0,), (2,), (1, 3), (3, 5), (1, 2, 3), (3, 4, 5, 5), (1, 1), (-1,), (6,), (4, 3), (3, 4, 2)],
)
def test_a_path_that_is_none_of_the_tree_s_is_refused(path: tuple[int, ...]) -> None:
    tensors = {"next_token": np.array([1], np.int32), "path": np.array(path, np.int32)}
    if path in PATHS:
        assert unpack_acceptance(tensors, FORK).path == path
    else:
        with pytest.raises(EngineError, match="not a path of the tree"):
            unpack_acceptance(tensors, FORK)


def test_a_release_is_told_from_a_step() -> None:
    assert released_sequence(crossed(pack_release(2**64 - 1))) == 2**64 - 1
    assert released_sequence(full_step()) == 0
    assert released_sequence(pack_release(5) | {"release": np.array([False])}) == 0


@pytest.mark.parametrize("kind", [UnknownSequence, Unavailable, RequestError, EngineLost, EngineError])
@pytest.mark.parametrize("words", ["the reason", "a: b: c", "engine: twice", "request: other", "two\nlines", ""])
def test_an_error_comes_back_as_what_it_was(kind: type[ServingError], words: str) -> None:
    back = error_from(error_text(kind(words)))
    assert type(back) is kind
    assert str(back) == words


def test_an_error_of_another_kind_keeps_its_words() -> None:
    back = error_from(error_text(ConfigError("no such device")))
    assert type(back) is EngineError and str(back) == "no such device"


@pytest.mark.parametrize("text", ["Stub process is not healthy.", "Failed: no model", "", "engines: x"])
def test_triton_s_own_words_mean_that_the_engine_is_lost(text: str) -> None:
    assert type(error_from(text)) is EngineLost
    assert str(error_from(text)) == text


@pytest.mark.parametrize(("extra", "lengths"), [((5, 6), (2,)), ((5,), (1, 2)), ((), (0, 1)), ((5,), (3, -1))], ids=str)
def test_burst_whose_passes_do_not_add_up_to_its_tokens_is_refused(
    extra: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    tensors = pack_acceptance(
        Acceptance((), 7, engine_speculation=EngineSpeculationResult("medusa", extra, lengths, 3))
    )
    with pytest.raises(EngineError, match="but passes of"):
        unpack_acceptance(tensors, TokenTree.bare())


@pytest.mark.parametrize("inside", [EngineSpeculation(0), EngineSpeculation(3, sizes=(4, 3))])
def test_wish_that_no_engine_could_read_is_refused(inside: EngineSpeculation) -> None:
    delta = delta_of(Context([1]), 0, 1, "")
    tensors = pack_step(StepRequest(delta, TokenTree.bare(), Sampling(), StepOptions(engine_speculation=inside), 1000))
    with pytest.raises(EngineError, match="inside_length must be 1 or more"):
        unpack_step(tensors, VOCAB_SIZE, MAX_NODES)
