"""Prompt lookup: the same proposals as a naive rescan of the whole text, at linear cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.proposers.prompt_lookup import PromptLookup, PromptLookupConfig, continuation
from orchestrator.types import Budget, Context, Sampling

WIDE = Budget(1000, 1000)


def lookup(max_ngram: int, draft_len: int) -> PromptLookup:
    return PromptLookup(PromptLookupConfig(max_ngram=max_ngram, draft_len=draft_len))


def proposed(proposer: PromptLookup, ids: list[int], budget: Budget = WIDE) -> list[int]:
    tree = proposer.propose(Context(ids), Sampling(), budget).tree
    assert tree.is_chain
    return tree.tokens.tolist()


def rescan(ids: list[int], max_ngram: int, draft_len: int) -> list[int]:
    """The truth: longest suffix first, then the most recent earlier place; beyond the end, its own copy."""
    for size in range(min(max_ngram, len(ids)), 0, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                text = list(ids)
                while len(text) < len(ids) + draft_len:
                    text.append(text[end + len(text) - len(ids)])
                return text[len(ids) :]
    return []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=10),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_lookup_grown_step_by_step_equals_a_rescan(
    prompt: list[int], steps: list[list[int]], max_ngram: int, draft_len: int
) -> None:
    proposer, ids = lookup(max_ngram, draft_len), list(prompt)
    for step in [*steps, []]:
        assert proposed(proposer, ids) == rescan(ids, max_ngram, draft_len)
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
    assert proposed(lookup(max_ngram, 3), ids) == expected


def test_lookup_periodic_text_is_drafted_beyond_its_period() -> None:
    assert proposed(lookup(3, 7), [5, 6, 5, 6]) == [5, 6, 5, 6, 5, 6, 5]
    assert continuation([1, 2, 3], 1, 5) == [2, 3, 2, 3, 2]


@given(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(0, 6), st.integers(0, 6))
def test_lookup_stays_within_the_budget(ids: list[int], max_nodes: int, max_depth: int) -> None:
    draft = proposed(lookup(3, 5), ids, Budget(max_nodes, max_depth))
    assert draft == rescan(ids, 3, 5)[: min(max_nodes, max_depth)]


class CountingDict(dict):  # type: ignore[type-arg]
    """Counts what is written and what is looked up."""

    num_written = num_read = 0

    def __setitem__(self, key: object, value: object) -> None:
        self.num_written += 1
        super().__setitem__(key, value)

    def get(self, key: object, default: object = None) -> object:
        self.num_read += 1
        return super().get(key, default)


def test_lookup_work_is_linear_in_the_text_however_often_it_is_asked() -> None:
    proposer, index, ids = lookup(3, 4), CountingDict(), [n * n % 101 for n in range(500)]
    proposer._ends = index
    for num_calls in range(1, 501):
        proposed(proposer, ids)
        ids.append(num_calls * 7 % 101)
        assert index.num_read <= 3 * num_calls
    assert index.num_written <= 3 * len(ids)
    assert len(index) <= index.num_written
