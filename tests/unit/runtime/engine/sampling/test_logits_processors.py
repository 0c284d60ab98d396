"""The counts behind the penalties: those of a direct count, in the order of the context, whatever was counted before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.core.context import Context
from runtime.engine.sampling.logits_processors import TokenCounts, completes


def counted(ids: Sequence[int], prompt_len: int, paths: Sequence[Sequence[int]]) -> tuple[list[int], list, list]:
    """Return the tokens of the context and of the paths, whether each occurs in a row, and how often, one by one."""
    tokens = list(dict.fromkeys([*ids, *(token for path in paths for token in path)]))
    occurs = [[token in [*ids, *path] for token in tokens] for path in paths]
    counts = [[[*ids[prompt_len:], *path].count(token) for token in tokens] for path in paths]
    return tokens, occurs, counts


def test_counts_are_those_of_a_direct_count_after_new_tokens_and_rollbacks() -> None:
    rng = np.random.default_rng(0)
    for seed in range(30):
        counts, prompt_len = TokenCounts(5), 5
        ids = rng.integers(0, 12, 40).tolist()
        for length in (5, 6, 6, 9, 20, 8, 30):
            changed = ids if seed % 2 else [*ids[:10], *rng.integers(0, 12, 30).tolist()]
            paths = [rng.integers(0, 20, size).tolist() for size in (0, 1, 4, 4)]
            counts.update(Context(changed[: length + 3]), length)
            tokens, occurs, times = counts.along(paths)
            expected = counted(changed[:length], prompt_len, paths)
            assert (tokens.tolist(), occurs.tolist(), times.tolist()) == expected
            assert (tokens.dtype, occurs.dtype, times.dtype) == (np.int64, np.bool_, np.float64)


def test_no_token_of_the_context_is_visited_again() -> None:
    class Closed(dict[int, int]):
        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError("all tokens were visited")

    counts, context = TokenCounts(2), Context([4, 5, 6, 4, 7])
    counts.update(context, 4)
    counts._columns = Closed(counts._columns)
    counts.update(context, 5)
    tokens, _, times = counts.along([[9, 4]])
    assert tokens.tolist() == [4, 5, 6, 7, 9] and times.tolist() == [[2.0, 0.0, 1.0, 1.0, 1.0]]


def test_a_bad_word_ends_after_its_first_tokens_alone() -> None:
    assert completes([7], []) and completes([5, 6, 7], [1, 5, 6])
    assert not completes([5, 6, 7], [6]) and not completes([5, 6, 7], [5, 6, 1]) and not completes([5, 6, 7], [4, 6])
