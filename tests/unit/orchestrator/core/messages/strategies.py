"""Random values of everything that crosses the wire, and complete calls, for the tests of this package."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.messages.context import Delta, delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.run import RunOptions
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import (
    Acceptance,
    Distribution,
    EngineSpeculation,
    EngineSpeculationResult,
    HeadInput,
    HiddenStates,
    StepOptions,
)

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
engine_options = st.builds(
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
    lambda flags, features, num_top, engine_speculation, num_node_top: StepOptions(
        *flags, features[0], num_top, features[1], engine_speculation, num_node_top
    ),
    st.tuples(st.booleans(), st.booleans()),
    features,
    st.integers(0, 20),
    st.one_of(st.none(), engine_options),
    st.integers(0, 8),
)
lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)
engine_results = lengths.flatmap(
    lambda lengths: st.builds(
        EngineSpeculationResult,
        st.sampled_from(["medusa", "lookahead"]),
        st.lists(token_ids, min_size=sum(lengths) - 1, max_size=sum(lengths) - 1).map(tuple),
        st.just(tuple(lengths)),
        st.integers(0, 500),
    )
)


@st.composite
def sampled_q(draw: st.DrawFn, tree: TokenTree) -> tuple[Distribution, ...]:
    """Return a q for every node; siblings share one, which holds the tokens of all of them."""
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
    """Return a tree and a possible acceptance of it."""
    tree = draw(trees)
    path: list[int] = []
    while (below := list(tree.children[path[-1] if path else 0].values())) and draw(st.booleans()):
        path.append(draw(st.sampled_from(below)))
    rows = draw(st.integers(0, 4))
    inside = None if path else draw(st.one_of(st.none(), engine_results))
    num_tokens = len(path) + 1 + (len(inside.extra) if inside else 0)
    return tree, Acceptance(
        tuple(path),
        draw(token_ids),
        target_tokens=draw(st.sampled_from([None, np.arange(tree.num_nodes + 1, dtype=np.int32)])),
        logprobs=draw(st.sampled_from([None, -np.linspace(1e-12, 40.0, num_tokens)])),
        top_ids=(top := draw(st.sampled_from([None, np.zeros((num_tokens, 2), np.int32)]))),
        top_logprobs=None if top is None else np.full((num_tokens, 2), -0.1),
        features=np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) if rows else None,
        features_start=draw(st.integers(0, 1000)) if rows else 0,
        forward_us=draw(st.integers(0, 10**9)),
        num_in_pass=draw(st.integers(1, 500)),
        num_in_separate_pass=draw(st.integers(0, 500)),
        num_cached_tokens=draw(st.integers(0, 10**6)),
        engine_speculation=inside,
        node_top_ids=draw(st.sampled_from([None, np.arange(2 * tree.num_nodes + 2, dtype=np.int32).reshape(-1, 2)])),
    )


def same(left: Any, right: Any) -> bool:
    """Return True if both are equal, arrays by dtype and content."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def full_step() -> StepRequest:
    delta = delta_of(Context([1, 2, 3]), 1, 9, "salt")
    tree = TokenTree.from_paths([[4, 5], [6]])
    options = StepOptions(True, True, 0, hidden_states=HiddenStates.LAST)
    run = RunOptions("auto", "{}", Limits(8, 64, 4), 0, (2,), (7,))
    return StepRequest(delta, tree, Sampling(0.5), options, 1000, run=run)


def full_draft() -> DraftRequest:
    delta = delta_of(Context([1, 2, 3]), 1, 9, "salt")
    head = HeadInput(np.ones((2, 3), np.float32), 1, TokenTree.chain([0, 1]), 4, 0.25, True, 0.5)
    return DraftRequest(delta, Sampling(0.5), 4, 4, head, 250)
