"""Prompt lookup: the same proposals as a naive rescan of the whole text, at linear cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.drafting.lookup import PromptLookup, PromptLookupConfig
from tests.support.decode import dependencies

WIDE = Budget(1000, 1000)


def lookup(length: str = "fixed", **options: Any) -> PromptLookup:
    return PromptLookup(PromptLookupConfig(length=length, **options), dependencies())


def tree_of(proposer: PromptLookup, ids: list[int], budget: Budget = WIDE) -> TokenTree:
    return proposer.propose(Context(ids), Sampling(), budget).tree


def proposed(proposer: PromptLookup, ids: list[int], budget: Budget = WIDE) -> list[int]:
    tree = tree_of(proposer, ids, budget)
    assert tree.is_chain
    return tree.tokens.tolist()


def paths_of(tree: TokenTree) -> list[list[int]]:
    """The root's branches as chains, in order."""
    paths = []
    for node in tree.children[0].values():
        path = []
        while node:
            path.append(int(tree.tokens[node - 1]))
            node = next(iter(tree.children[node].values()), 0)
        paths.append(path)
    return paths


def places(ids: list[int], size: int) -> list[int]:
    """Where the last `size` tokens stood before, as the position after them."""
    return [end for end in range(size, len(ids)) if ids[end - size : end] == ids[-size:]]


def rescan(ids: list[int], max_ngram: int, draft_len: int, match: str = "recent", clip: bool = False) -> list[int]:
    """The truth: longest suffix first, then the place that `match` names; beyond the end, the text's own copy."""
    for size in range(min(max_ngram, len(ids) - 1), 0, -1):
        if found := places(ids, size):
            rank = {
                "recent": lambda end: end,
                "leftmost": lambda end: -end,
                "frequent": lambda end: (sum(ids[other] == ids[end] for other in found), end),
            }
            start = max(found, key=rank[match])
            text = list(ids)
            while len(text) < len(ids) + draft_len:
                text.append(text[start + len(text) - len(ids)])
            return text[len(ids) : len(ids) + (min(draft_len, len(ids) - start) if clip else draft_len)]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=10),
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from(["recent", "frequent", "leftmost"]),
    st.booleans(),
)
def test_lookup_grown_step_by_step_equals_a_rescan(
    prompt: list[int], steps: list[list[int]], max_ngram: int, draft_len: int, match: str, clip: bool
) -> None:
    proposer, ids = lookup(max_ngram=max_ngram, draft_len=draft_len, match=match, clip=clip), list(prompt)
    for step in [*steps, []]:
        assert proposed(proposer, ids) == rescan(ids, max_ngram, draft_len, match, clip)
        ids += step


@pytest.mark.parametrize(
    ("ids", "max_ngram", "expected"),
    [
        ([1, 2, 3, 9, 2, 7, 1, 2], 2, [3, 9, 2]),  # longest first: 1 2, not the more recent 2
        ([1, 2, 3, 9, 2, 7, 1, 2], 1, [7, 1, 2]),  # the most recent 2
        ([1, 2, 5, 1, 2, 6, 1, 2], 2, [6, 1, 2]),  # the most recent of two equal matches
        ([8, 1, 4, 1], 3, [4, 1, 4]),  # falls back to one token, goes on into its own copy
        ([7, 7], 3, [7, 7, 7]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_lookup_by_hand(ids: list[int], max_ngram: int, expected: list[int]) -> None:
    assert proposed(lookup(max_ngram=max_ngram, draft_len=3), ids) == expected


@pytest.mark.parametrize(("match", "expected"), [("recent", [6, 0]), ("frequent", [5, 0]), ("leftmost", [4, 0])])
def test_lookup_match_names_the_place(match: str, expected: list[int]) -> None:
    ids = [1, 2, 4, 0, 1, 2, 5, 0, 1, 2, 5, 0, 1, 2, 6, 0, 1, 2]
    assert proposed(lookup(max_ngram=2, draft_len=2, match=match), ids) == expected


def test_lookup_branches_differ_in_their_first_token_and_keep_the_order() -> None:
    ids = [9, 2, 3, 3, 1, 2, 4, 4, 1, 2, 5, 5, 1, 2, 5, 6, 1, 2]
    assert paths_of(tree_of(lookup(draft_len=2, branches=1), ids)) == [[5, 6]]
    assert paths_of(tree_of(lookup(draft_len=2, branches=2), ids)) == [[5, 6], [4, 4]]
    # When the longest suffix has no further continuation, shorter ones add theirs: 3 stood after 2, not after 1 2.
    assert paths_of(tree_of(lookup(draft_len=2, branches=9), ids)) == [[5, 6], [4, 4], [3, 3]]
    assert paths_of(tree_of(lookup(draft_len=2, branches=9, match="leftmost"), ids)) == [[4, 4], [5, 5], [3, 3]]


def test_lookup_grown_length_is_twice_what_agreed() -> None:
    ids = [7, 1, 2, 3, 4, 5, 6, 0, 0, 8, 1, 2]
    assert proposed(lookup(length="grown", max_ngram=1), ids) == [3, 4, 5, 6]
    assert proposed(lookup(length="grown", max_ngram=1, draft_len=3), ids) == [3, 4, 5]
    assert proposed(lookup(length="grown"), [1, 5, 5, 5, 2, 1]) == [5, 5]
    # The whole text before the place agrees: there is nothing more to compare.
    assert proposed(lookup(length="grown", draft_len=9), [4, 4, 4]) == [4] * 4


def test_lookup_periodic_text_is_drafted_beyond_its_period_unless_clipped() -> None:
    assert proposed(lookup(draft_len=7), [5, 6, 5, 6]) == [5, 6, 5, 6, 5, 6, 5]
    assert proposed(lookup(draft_len=7, clip=True), [5, 6, 5, 6]) == [5, 6]


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(0, 6), st.integers(0, 6))
def test_lookup_stays_within_the_budget(ids: list[int], max_nodes: int, max_depth: int) -> None:
    draft = proposed(lookup(draft_len=5), ids, Budget(max_nodes, max_depth))
    assert draft == rescan(ids, 3, 5)[: min(max_nodes, max_depth)]


@settings(max_examples=1000, deadline=None)
@given(
    st.integers(2, 6).flatmap(lambda vocab: st.lists(st.integers(0, vocab), min_size=2, max_size=60)),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_lookup_proposes_what_transformers_does_at_its_settings(ids: list[int], max_ngram: int, draft_len: int) -> None:
    torch = pytest.importorskip("torch")
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    peer = PromptLookupCandidateGenerator(
        num_output_tokens=draft_len, max_matching_ngram_size=max_ngram, max_length=100_000
    )
    candidates, _ = peer.get_candidates(torch.tensor([ids]))

    ours = lookup(max_ngram=max_ngram, draft_len=draft_len, match="leftmost", clip=True)
    assert proposed(ours, ids) == candidates[0, len(ids) :].tolist()


def as_first_posted(ids: list[int], max_ngram: int, draft_len: int) -> list[int]:
    """Return what the first published version proposes, read literally, with torch's windows as slices."""
    input_length = len(ids)
    for ngram_size in range(max_ngram, 0, -1):
        ngram = ids[-ngram_size:]
        windows = [ids[start : start + ngram_size] for start in range(input_length - ngram_size + 1)]
        for idx in (start for start, window in enumerate(windows) if window == ngram):
            start_idx = idx + ngram_size
            end_idx = start_idx + draft_len
            if end_idx <= input_length and start_idx < input_length - ngram_size:
                return ids[start_idx:end_idx]
    return []


@given(
    st.integers(2, 6).flatmap(lambda vocab: st.lists(st.integers(0, vocab), min_size=2, max_size=60)),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_lookup_that_skips_short_continuations_is_the_method_as_first_posted(
    ids: list[int], max_ngram: int, draft_len: int
) -> None:
    ours = lookup(max_ngram=max_ngram, draft_len=draft_len, match="leftmost", clip="skip")
    assert proposed(ours, ids) == as_first_posted(ids, max_ngram, draft_len)


def test_a_skipped_place_gives_way_to_the_next_one() -> None:
    text = [5, 1, 2, 3, 5, 4, 5]
    assert proposed(lookup(max_ngram=1, draft_len=3, clip="skip"), text) == [1, 2, 3]
    assert proposed(lookup(max_ngram=1, draft_len=3, clip=True), text) == [4, 5]


def test_the_place_of_the_first_published_version_is_far_enough_from_the_end() -> None:
    text = [0, 1, 1, 0, 1, 1, 1, 0, 1, 1]
    assert proposed(lookup(max_ngram=4, draft_len=4, match="leftmost", clip="skip"), text) == [0, 1, 1, 1]
