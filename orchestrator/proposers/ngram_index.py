"""Where every n-gram of a growing text stood; linear in the text, never rescanned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# A token costs about 150 bytes for each n: a request with a long prompt shall not be able to fill the memory.
MAX_NGRAM = 8


class NgramIndex:
    """Places of all n-grams of 1…max_ngram tokens that have a continuation.

    A place is the position of the token that follows. Costs O(max_ngram) time and memory per token.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def extend(self, ids: Sequence[int]) -> None:
        """Note the n-grams that are new since the last call: all but those that end with the text itself."""
        for end in range(self._num_indexed + 1, len(ids)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._places.setdefault(tuple(ids[end - size : end]), []).append(end)
        self._num_indexed = len(ids) - 1

    def matches(self, ids: Sequence[int], min_ngram: int = 1) -> Iterator[list[int]]:
        """Yield the places of the longest suffix of `ids` that has any, ascending; then of each shorter one.

        min_ngram: tokens of the shortest suffix that is looked up.
        """
        for size in range(min(self._max_ngram, len(ids)), min_ngram - 1, -1):
            if places := self._places.get(tuple(ids[-size:])):
                yield places
