"""Token Recycling: its trees are those of a plain reference, its text the target's own, its sharing by salt alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference import decoding as reference
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import RequestError
from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance
from orchestrator.drafting.adjacency import MAX_SHARED_BYTES, NUM_FOLLOWERS, AdjacencyMatrix, SharedMatrices
from orchestrator.drafting.recycling import PUBLISHED, Recycling, RecyclingConfig
from orchestrator.drafting.registry import select_method
from tests.support.decode import decode, dependencies, observe
from tests.support.table_target import TableTarget

V = 30
WIDE = Budget(1000, 1000)
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]


def recycling(shared: AdjacencyMatrix | None = None, **values: object) -> Recycling:
    config = RecyclingConfig.model_validate({"max_nodes": 80, **values})
    return Recycling(config, dependencies(vocab_size=V, shared_adjacency=(lambda: shared) if shared else None))


class PlainRecycling:
    """The method once more, over lists: token → its most probable followers."""

    def __init__(self, choices: Sequence[Sequence[int]], prompt: Sequence[int]) -> None:
        self.choices = choices
        self.top: dict[int, list[int]] = {}
        for place, token in enumerate(prompt[:-1]):
            others = [each for each in self.top.get(token, []) if each != prompt[place + 1]]
            self.top[token] = [prompt[place + 1], *others][:NUM_FOLLOWERS]

    def paths(self, root: int) -> Iterator[tuple[int, ...]]:
        """Yield the tokens on the path of every choice whose tokens are known, in order."""
        for ranks in self.choices:
            path: list[int] = []
            for rank in ranks:
                followers = self.top.get(path[-1] if path else root, [])
                if rank >= len(followers):
                    break
                path.append(followers[rank])
            else:
                yield tuple(path)

    def learn(self, texts: Sequence[Sequence[int]], accepted: Sequence[int], target: TableTarget) -> None:
        """texts: the text up to each node, in order; accepted: those of them whose path was accepted, in order."""
        others = [place for place in range(len(texts)) if place not in accepted]
        for place in [*others, *accepted]:
            logits = target.logits(texts[place])
            ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
            self.top[texts[place][-1]] = ranked[:NUM_FOLLOWERS]


def same_tree(proposal: Proposal, paths: Sequence[tuple[int, ...]]) -> bool:
    return proposal.tree.paths[1:] == list(paths)


addresses = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    st.builds(TableTarget, st.integers(5, V), st.integers(1, 2), st.integers(0, 10**6), st.just(1.5)),
    st.lists(st.integers(0, 4), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.9]),
    st.booleans(),
    st.one_of(st.none(), addresses),
)
def test_trees_are_the_plain_method_s(
    target: TableTarget, prompt: list[int], temperature: float, from_prompt: bool, chosen: list[list[int]] | None
) -> None:
    proposer = recycling(from_prompt=from_prompt, **({"choices": chosen} if chosen else {}))
    choices = [list(path) for path in (RecyclingConfig(choices=chosen).choices if chosen else PUBLISHED).paths[1:]]
    plain = PlainRecycling(choices, prompt if from_prompt else [])
    context, sampling = Context(prompt), Sampling(temperature, seed=target.table_seed)
    for _ in range(8):
        proposal = proposer.propose(context, sampling, WIDE)
        assert same_tree(proposal, list(plain.paths(context.root)))
        acceptance = target.step(context, proposal.tree, sampling, proposer.needs)
        texts = [[*context.ids, *path] for path in proposal.tree.paths]
        context.commit(acceptance.tokens(proposal.tree))
        observe(proposer, proposal.tree, acceptance)
        plain.learn(texts, [0, *acceptance.path], target)
    assert context.output[:8] == reference.generate(target.logits, prompt, sampling, 8)


def test_a_step_by_hand() -> None:
    proposer, context = recycling(choices=[[0, 0], [1], [0, 1]]), Context(PROMPT)
    proposal = proposer.propose(context, Sampling(), WIDE)
    # 2 was followed by 3 and then by 4; 3 by 1; nothing is known of what follows 4 but 1.
    assert proposal.tree.paths[1:] == [(4,), (3,), (4, 1)]
    assert proposal.sources == ("recycling",) * 3
    tops = np.array([[9, 4], [8, 7], [6, 5], [3, 2]], np.int32)
    context.commit([4, 8])
    observe(proposer, proposal.tree, Acceptance((1,), 8, node_top_ids=tops))
    # 8 is unknown: nothing can stand below it.
    assert proposer.propose(context, Sampling(), WIDE).tree.num_nodes == 0
    context.commit([2])
    # 2 → 9, 4; 9 is unknown, so that the path of [0, 0] ends there.
    assert proposer.propose(context, Sampling(), WIDE).tree.paths[1:] == [(9,), (4,)]


def test_of_a_token_at_several_nodes_the_accepted_one_counts() -> None:
    proposer, context = recycling(choices=[[0], [1]], from_prompt=False), Context([5])
    tree = TokenTree.from_paths([[6], [7, 6]])  # a union's tree: 6 stands at nodes 1 and 3
    tops = np.array([[1, 2], [3, 4], [8, 9], [10, 11]], np.int32)
    for path, expected in (((1,), [(3,), (4,)]), ((2, 3), [(10,), (11,)]), ((), [(10,), (11,)])):
        proposer.propose(context, Sampling(), WIDE)
        observe(proposer, tree, Acceptance(path, 0, node_top_ids=tops))
        assert proposer.propose(Context([6]), Sampling(), WIDE).tree.paths[1:] == expected


def test_the_published_tree_has_its_eighty_nodes() -> None:
    assert np.bincount(PUBLISHED.depths).tolist() == [1, 8, 21, 25, 15, 8, 3]
    addresses = set(PUBLISHED.paths[1:])
    assert {(0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0), (1, 0, 1), (7, 0), (0, 7, 0)} <= addresses
    assert not {(1, 4), (8,), (0, 0, 0, 5), (1, 1, 1), (7, 0, 0)} & addresses
    assert PUBLISHED.paths[1] == (0,)


@pytest.mark.parametrize("max_nodes", [0, 1, 5, 80])
def test_a_budget_keeps_the_first_nodes(max_nodes: int) -> None:
    proposer, context = recycling(), Context(PROMPT)
    whole = proposer.propose(context, Sampling(), WIDE).tree
    cut = proposer.propose(context, Sampling(), Budget(max_nodes, 2)).tree
    assert cut.paths[1:] == [path for path in whole.paths[1:] if len(path) <= 2][:max_nodes]


@settings(deadline=None, max_examples=40)
@given(
    st.builds(Sampling, st.sampled_from([0.0, 0.8]), seed=st.integers(0, 10**6)),
    st.integers(1, 30),
    st.integers(0, 20),
)
def test_text_is_the_reference_s(sampling: Sampling, max_tokens: int, max_nodes: int) -> None:
    target = TableTarget(V, table_seed=sampling.seed % 5)
    said, _ = decode(target, recycling(), PROMPT, sampling, Limits(max_tokens, 1000, max_nodes))
    assert said == reference.generate(target.logits, PROMPT, sampling, max_tokens)


def test_a_language_of_short_memory_is_learnt_in_a_few_steps() -> None:
    _, statistics = decode(TableTarget(V, order=1), recycling(), PROMPT, Sampling(), Limits(60, 1000, 24))
    assert statistics.num_steps <= 30 and statistics.sources["recycling"].num_accepted >= 30


def test_a_step_without_top_tokens_teaches_nothing() -> None:
    proposer = recycling(from_prompt=False)
    tree = proposer.propose(Context([3]), Sampling(), WIDE).tree
    observe(proposer, tree, Acceptance((), 3))
    assert proposer.propose(Context([3]), Sampling(), WIDE).tree.num_nodes == 0


def test_requests_of_one_salt_share_what_the_target_said_and_never_a_prompt() -> None:
    matrices = SharedMatrices(V)
    first = recycling(matrices.of("a"))
    tree = first.propose(Context([1, 2, 1]), Sampling(), WIDE).tree
    assert tree.num_nodes
    assert not matrices.of("a").knows(np.arange(V + 1)).any()
    observe(first, tree, Acceptance((), 9, node_top_ids=np.tile(np.array([[4, 5]], np.int32), (tree.num_nodes + 1, 1))))
    same, other = (recycling(matrices.of(salt)).propose(Context([1]), Sampling(), WIDE).tree for salt in "ab")
    assert {path[0] for path in same.paths[1:]} == {4, 5} and other.num_nodes == 0


def test_the_request_s_own_rows_come_before_the_shared_ones() -> None:
    shared = AdjacencyMatrix(V)
    shared.learn(np.array([2, 3]), np.array([[7, 8], [9, 10]], np.int32))  # after the tokens 1 and 2
    tree = recycling(shared, choices=[[0, 0], [1]]).propose(Context([1, 6, 1]), Sampling(), WIDE).tree
    assert tree.paths[1:] == [(6,), (6, 1)]
    tree = recycling(shared, choices=[[0, 0], [1]]).propose(Context([2]), Sampling(), WIDE).tree
    assert tree.paths[1:] == [(9,), (10,)]


def test_shared_matrices_are_bounded_and_the_one_used_longest_ago_goes() -> None:
    vocab_size = MAX_SHARED_BYTES // (4 * NUM_FOLLOWERS) // 3  # room for not quite three
    matrices = SharedMatrices(vocab_size)
    first, second = matrices.of("1"), matrices.of("2")
    assert matrices.of("1") is first
    matrices.of("3")
    assert matrices.of("1") is first and matrices.of("2") is not second
    assert SharedMatrices(100 * vocab_size)._max_matrices == 1


def test_ranks_beyond_the_kept_followers_are_refused() -> None:
    with pytest.raises(RequestError, match=r"choices must have ranks in 0\.\.7.*got 8"):
        select_method("recycling", json.dumps({"choices": [[0], [8]]}), frozenset(), {})
    assert select_method("recycling", json.dumps({"choices": [[0, 7]]}), frozenset(), {}).config.max_nodes == 2
    assert select_method("recycling", json.dumps({"choices": [[0, 0]]}), frozenset(), {}).branches == ""
