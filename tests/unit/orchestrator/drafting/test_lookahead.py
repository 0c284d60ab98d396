"""Lookahead: each step as worked by hand from docs/methods/lookahead.md, and the text the target's own."""

from __future__ import annotations

import json
import random
from string import ascii_letters

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
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.lookahead import Lookahead, LookaheadConfig, NgramPool, Shape, shape_of
from orchestrator.drafting.registry import select_method
from tests.support.decode import decode, dependencies, observe
from tests.support.lookahead_figures import (
    ACCEPTED_IN_WARM_UP,
    FIRST_NGRAMS,
    NOTHING_ACCEPTED,
    PROMPT,
    REFILLED,
    TWO_ACCEPTED,
    TWO_CANDIDATES,
    WARM_UP_1,
    WARM_UP_2,
    Pass,
)
from tests.support.table_target import TableTarget

WIDE = Budget(1000, 1000)


def ids(text: str) -> list[int]:
    return [ascii_letters.index(letter) for letter in text]


def text(tokens: list[int] | tuple[int, ...]) -> str:
    return "".join(ascii_letters[token] for token in tokens)


def lookahead(window: int, ngram: int, guesses: int, pool_from_prompt: bool = False) -> Lookahead:
    return Lookahead(
        LookaheadConfig(window=window, ngram=ngram, guesses=guesses, pool_from_prompt=pool_from_prompt),
        dependencies(max_nodes=10**6),
    )


def rows_of(proposer: Lookahead) -> list[list[int]]:
    assert proposer._window
    return proposer._window.rows


def follow(proposer: Lookahead, context: Context, figure: Pass) -> None:
    """Take one step with a target that says what the figure says, and compare what is seen of it."""
    tokens, target_tokens, masks = zip(*(line.split() for line in figure.tree.split("\n") if line.strip()), strict=True)
    paths = ["".join(token for token, seen in zip(tokens, mask, strict=False) if seen == "#") for mask in masks]
    script = {(*context.ids[:-1], *ids(path)): ids(pick)[0] for path, pick in zip(paths, target_tokens, strict=True)}

    proposal = proposer.propose(context, Sampling(), WIDE)
    tree = proposal.tree
    assert text([context.root, *tree.tokens.tolist()]) == "".join(tokens)
    assert ["".join(".#"[int(seen)] for seen in row[: i + 1]) for i, row in enumerate(tree.mask)] == list(masks)
    assert not np.triu(tree.mask, 1).any()
    assert proposal.sources == (
        ("lookahead.pool",) * figure.num_candidates
        + ("lookahead.window",) * (len(tokens) - 1 - figure.num_candidates)
    )  # fmt: skip

    acceptance = TableTarget(len(ascii_letters), script=script).step(context, tree, Sampling(), proposer.needs)
    assert text(acceptance.tokens(tree)[:-1]) == figure.accepted
    context.commit(acceptance.tokens(tree))
    observe(proposer, tree, acceptance)
    assert [text(row) for row in rows_of(proposer)] == figure.rows
    assert {key: [text(tail) for tail in proposer._pool.tails(ids(key)[0])] for key in figure.pool} == figure.pool


def test_lookahead_steps_equal_the_figures_worked_by_hand() -> None:
    proposer, context = lookahead(5, 4, 2), Context(ids(PROMPT))
    for figure in (
        WARM_UP_1, WARM_UP_2, FIRST_NGRAMS, NOTHING_ACCEPTED, TWO_ACCEPTED, REFILLED, TWO_CANDIDATES,
    ):  # fmt: skip
        follow(proposer, context, figure)
    assert text(context.output) == "BCDGMSXGMfkY"


def test_lookahead_tokens_accepted_in_warm_up_move_all_rows() -> None:
    follow(lookahead(5, 4, 2), Context(ids(PROMPT)), ACCEPTED_IN_WARM_UP)


def test_lookahead_pool_from_the_prompt_is_asked_at_the_first_step() -> None:
    proposer, context = lookahead(5, 4, 2, pool_from_prompt=True), Context(ids("ABCDEABCFA"))
    proposal = proposer.propose(context, Sampling(), WIDE)
    # A was followed by BCD, then by BCF; row 0 = ABCDEA is a branch of its own.
    assert text(proposal.tree.tokens.tolist()) == "BCFDABCDEA"
    assert proposal.tree.parents.tolist() == [0, 1, 2, 2, 0, 5, 6, 7, 8, 9]
    assert proposal.sources == ("lookahead.pool",) * 4 + ("lookahead.window",) * 6


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    """Per node the tokens that it sees below the root, in order of depth (its own the last)."""
    tree = proposal.tree
    return [tuple(tree.tokens[np.flatnonzero(row[1:])].tolist()) for row in tree.mask[1:]]


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(2, 6), st.integers(1, 4), st.integers(2, 30), st.integers(0, 10**6))
def test_lookahead_masks_obey_the_source(window: int, ngram: int, guesses: int, vocab_size: int, seed: int) -> None:
    """A window token sees row 0 up to its column and its own column above it; a candidate sees itself alone."""
    proposer, rng = lookahead(window, ngram, guesses), random.Random(seed)
    context = Context([rng.randrange(vocab_size) for _ in range(5)])
    target = TableTarget(vocab_size, order=1, table_seed=seed, sharpness=1.0)
    for _ in range(3 * ngram):
        proposal = proposer.propose(context, Sampling(), WIDE)
        rows, tails = rows_of(proposer), proposer._pool.tails(context.root)
        cells = [
            (*rows[0][1 : column + 1], *(row[column] for row in rows[1 : j + 1]))
            for j in range(len(rows))
            for column in range(len(rows[0]))
        ]
        candidates = [tail[:length] for tail in tails for length in range(1, len(tail) + 1)]
        paths, bound = paths_of(proposal), 1 + (window - 1) + (ngram - 2) * window + guesses * (ngram - 1)
        assert len(paths) == len(set(paths)) and 1 + len(paths) <= bound
        assert set(paths) <= {*cells, *candidates}
        if 1 + len({*cells, *candidates} - {()}) <= bound:  # a window that is wider while it fills may be cut
            assert set(paths) == {*cells, *candidates} - {()}
        sources = ["lookahead.pool" if path in set(candidates) else "lookahead.window" for path in paths]
        assert list(proposal.sources) == sources == sorted(sources)
        acceptance = target.step(context, proposal.tree, Sampling(), proposer.needs)
        context.commit(acceptance.tokens(proposal.tree))
        observe(proposer, proposal.tree, acceptance)
        assert rows_of(proposer)[0][0] == context.root


class Counting(TableTarget):
    """Says 1, 2, 3, … by position, whatever stands before it."""

    def logits(self, ids: list[int]) -> np.ndarray:  # type: ignore[override, type-arg]
        return np.where(np.arange(self.vocab_size) == len(ids), 50.0, 0.0)


@given(
    st.integers(1, 6),
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=12),
)
def test_lookahead_whatever_is_left_out_tokens_keep_their_positions(
    window: int, ngram: int, budgets: list[tuple[int, int]]
) -> None:
    """Each token is the right one for its place, or 0 from the prompt: under any budgets and accepted lengths."""
    proposer, context, target = lookahead(window, ngram, 2), Context([0]), Counting(200)
    for max_nodes, max_depth in budgets:
        budget = Budget(max_nodes, max_depth)
        proposal = proposer.propose(context, Sampling(), budget)
        assert proposal.cut(budget) is proposal
        acceptance = target.step(context, proposal.tree, Sampling(), proposer.needs)
        context.commit(acceptance.tokens(proposal.tree))
        observe(proposer, proposal.tree, acceptance)
        root = len(context) - 1
        for j, row in enumerate(rows_of(proposer)):
            assert all(token in (0, root + i + j) for i, token in enumerate(row))
        assert {len(row) for row in rows_of(proposer)} == {window + ngram - 1 - len(rows_of(proposer))}


def test_lookahead_columns_beyond_the_budget_are_refilled() -> None:
    proposer, context = lookahead(5, 4, 2), Context(ids(PROMPT))
    follow(proposer, context, WARM_UP_1)
    tree = proposer.propose(context, Sampling(), Budget(99, 2)).tree
    assert text(tree.tokens.tolist()) == "KFLG"  # M, below F G, would be the third level; column 2 ends there
    target_tokens = np.array(ids("CQZRZ"), np.int32)
    observe(proposer, tree, Acceptance((), ids("C")[0], target_tokens))
    assert [text(row) for row in rows_of(proposer)] == ["CGHIJ", "LMNOP", "RAEFG"]
    tree = proposer.propose(context, Sampling(), Budget(99, 0)).tree
    assert tree.num_nodes == 0
    observe(proposer, tree, Acceptance((), ids("D")[0], np.array(ids("D"), np.int32)))
    assert [text(row) for row in rows_of(proposer)] == ["DMNOP", "RAEFG", "HIJAE"]


def test_lookahead_column_left_out_ends_the_row_though_the_pool_brings_a_later_one() -> None:
    proposer, context = lookahead(5, 4, 2), Context(ids(PROMPT))
    for figure in (WARM_UP_1, WARM_UP_2, FIRST_NGRAMS, NOTHING_ACCEPTED):
        follow(proposer, context, figure)
    proposer._pool.add(tuple(ids("GSbg")))  # column 1, whole
    tree = proposer.propose(context, Sampling(), Budget(3, 99)).tree
    assert text(tree.tokens.tolist()) == "Sbg"
    observe(proposer, tree, Acceptance((), ids("X")[0], np.array(ids("XYYY"), np.int32)))
    assert [text(row) for row in rows_of(proposer)] == ["Xbcde", "fghij", "AEFGH"]


def test_lookahead_narrow_window_keeps_the_bound_while_it_fills() -> None:
    """W = 1, N = 8: four rows of four columns would be 15 nodes, more than the full window and its candidate."""
    proposer, context = lookahead(1, 8, 1), Context(ids(PROMPT))
    sizes = []
    for _ in range(9):
        tree = proposer.propose(context, Sampling(), WIDE).tree
        sizes.append(tree.num_nodes)
        acceptance = TableTarget(len(ascii_letters)).step(context, tree, Sampling(), proposer.needs)
        context.commit(acceptance.tokens(tree))
        observe(proposer, tree, acceptance)
    assert max(sizes) == Shape(1, 8, 1).num_nodes == 13 and sizes[-1] == 6


def test_lookahead_answer_without_picks_moves_the_window_all_the_same() -> None:
    proposer, context = lookahead(5, 4, 2), Context(ids(PROMPT))
    tree = proposer.propose(context, Sampling(), WIDE).tree
    observe(proposer, tree, Acceptance((), ids("B")[0]))
    assert [text(row) for row in rows_of(proposer)] == ["BFGHIJ", "AEFGHI"]


def test_pool_keeps_the_tails_that_were_entered_last() -> None:
    pool = NgramPool(2)
    for ngram in ("abc", "ade", "abc", "afg", "xyz"):
        pool.add(tuple(ids(ngram)))
    assert [text(tail) for tail in pool.tails(ids("a")[0])] == ["fg", "bc"]  # bc came again after de
    assert [text(tail) for tail in pool.tails(ids("x")[0])] == ["yz"]
    assert pool.tails(ids("q")[0]) == []


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    shape=st.tuples(st.integers(1, 6), st.integers(2, 5), st.integers(1, 4)),
    max_tokens=st.integers(1, 40),
    max_nodes=st.integers(0, 60),
    spare_positions=st.integers(-3, 3),
    stop_ids=st.frozensets(st.integers(0, 5), max_size=1),
    pool_from_prompt=st.booleans(),
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_lookahead_gives_the_reference_s_text(
    temperature: float,
    seed: int,
    shape: tuple[int, int, int],
    max_tokens: int,
    max_nodes: int,
    spare_positions: int,
    stop_ids: frozenset[int],
    pool_from_prompt: bool,
) -> None:
    target, prompt = TableTarget(6, table_seed=seed % 7), [1, 2, 3, 1, 2]
    sampling = Sampling(temperature, top_p=0.95, seed=seed)
    limits = Limits(max_tokens, max(len(prompt) + max_tokens + spare_positions, 1), max_nodes)
    said, _ = decode(target, lookahead(*shape, pool_from_prompt), prompt, sampling, limits, stop_ids)
    assert said == reference.generate(target.logits, prompt, sampling, max_tokens, stop_ids)


@pytest.mark.parametrize(("temperature", "most_steps"), [(0.0, 40), (0.5, 70)])
def test_lookahead_language_that_repeats_takes_fewer_steps_than_tokens(temperature: float, most_steps: int) -> None:
    """So the law above is not vacuous, and both sources have their share."""
    target = TableTarget(12, order=1, table_seed=5, sharpness=3.0)
    _, statistics = decode(
        target, lookahead(5, 4, 5), [1, 2, 3], Sampling(temperature, seed=3), Limits(100, 10_000, 128)
    )
    sources = statistics.sources
    assert statistics.num_steps <= most_steps
    assert sources["lookahead.pool"].num_accepted > 20 and sources["lookahead.window"].num_accepted > 0


@pytest.mark.parametrize(
    ("num_parameters", "shape"),
    [
        (0, (5, 4, 5)),
        (11_370_496, (5, 4, 5)),
        (1_235_814_400, (5, 4, 5)),
        (6_738_149_376, (15, 5, 15)),
        (8_029_995_008, (15, 5, 15)),
        (13_015_449_600, (10, 5, 10)),
        (33_743_175_680, (7, 5, 7)),
        (70 * 10**9, (7, 5, 7)),
    ],
)
def test_shape_follows_the_target_s_size(num_parameters: int, shape: tuple[int, int, int]) -> None:
    assert shape_of(LookaheadConfig(), num_parameters, 128) == shape
    assert shape_of(LookaheadConfig(window=3, ngram=2), num_parameters, 128) == (3, 2, shape[2])


@pytest.mark.parametrize(("shape", "num_nodes"), [((5, 4, 5), 29), ((15, 5, 15), 119), ((5, 2, 5), 9), ((1, 2, 1), 1)])
def test_shape_needs_as_many_nodes_as_the_source_says(shape: tuple[int, int, int], num_nodes: int) -> None:
    assert Shape(*shape).num_nodes == num_nodes


def refusal(config: dict[str, int], max_nodes: int = 128, num_parameters: int = 0) -> str:
    made = select_method("lookahead", json.dumps(config), frozenset(), {})
    with pytest.raises(RequestError) as caught:
        made.proposer(ProposerDependencies(lambda name: None, 64, max_nodes=max_nodes, num_parameters=num_parameters))  # type: ignore[arg-type, return-value]
    return str(caught.value)


def test_lookahead_window_that_does_not_fit_is_refused_with_its_nodes() -> None:
    said = "lookahead with window 15, ngram 5, guesses 15 needs 119 nodes, but 118 are allowed"
    assert refusal({"window": 15, "ngram": 5, "guesses": 15, "max_nodes": 118}).startswith(said)
    assert refusal({"window": 15, "ngram": 5, "guesses": 15}, max_nodes=118).startswith(said)
    assert refusal({}, max_nodes=118, num_parameters=7 * 10**9).startswith(said)
    assert "needs 29 nodes, but 28 are allowed" in refusal({}, max_nodes=28)
    select_method("lookahead", "", frozenset(), {}).proposer(ProposerDependencies(lambda name: None, 64, max_nodes=29))  # type: ignore[arg-type, return-value]


def test_lookahead_ngram_of_one_token_is_refused() -> None:
    assert refusal({"ngram": 1}).startswith("ngram must be 0 (by the target's size) or in 2..128, got 1")


def test_lookahead_tree_is_one_that_the_target_takes() -> None:
    tree = lookahead(5, 4, 2).propose(Context(ids(PROMPT)), Sampling(), WIDE).tree
    TokenTree.checked(tree.tokens, tree.parents, len(ascii_letters), 128)
    for array in (tree.tokens, tree.parents):
        assert array.dtype == np.int32 and array.flags.c_contiguous
