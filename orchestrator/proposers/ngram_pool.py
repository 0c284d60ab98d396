"""The n-grams that Lookahead has seen, by first token; knows no positions."""

from __future__ import annotations

from collections.abc import Sequence


class NgramPool:
    """Up to `guesses` tails per first token; the one that was entered longest ago makes room.

    Source: Fu et al. 2024, arXiv:2402.02057, section 3.2.
    """

    def __init__(self, guesses: int) -> None:
        self._guesses = guesses
        self._tails: dict[int, dict[tuple[int, ...], None]] = {}  # dictionaries keep the order of entry

    def add(self, ngram: tuple[int, ...]) -> None:
        """Enter an n-gram; one that is there already becomes the newest of its key."""
        tails = self._tails.setdefault(ngram[0], {})
        tails.pop(ngram[1:], None)
        tails[ngram[1:]] = None
        if len(tails) > self._guesses:
            del tails[next(iter(tails))]

    def add_text(self, ids: Sequence[int], size: int) -> None:
        """Enter all n-grams of `size` tokens of a text, in order."""
        for ngram in zip(*(ids[start:] for start in range(size)), strict=False):
            self.add(ngram)

    def tails(self, token: int) -> list[tuple[int, ...]]:
        """Return what has followed `token`, the newest first."""
        return list(reversed(self._tails.get(token, ())))
