"""The window of Lookahead decoding: the last rows of a Jacobi trajectory, aligned by position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from orchestrator.proposers.jacobi import filled


class Window:
    """ngram − 1 rows of `width` columns; fewer rows, and wider ones, in the first ngram − 2 steps.

    rows: oldest first; rows[j][i] is a guess at position root + i + j, and rows[0][0] is the root itself.
    spare: tokens that fill the columns for which there is no guess yet, row by row.
    Source: Fu et al. 2024, arXiv:2402.02057, Algorithm 2; docs/methods/lookahead.md.
    """

    def __init__(self, width: int, ngram: int, root: int, spare: Iterator[int]) -> None:
        self._width = width
        self._num_rows = ngram - 1
        self._spare = spare
        self.rows = [[root, *islice(spare, width + ngram - 3)]]

    @property
    def is_full(self) -> bool:
        """True when a column and its answer are an n-gram."""
        return len(self.rows) == self._num_rows

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """Each column's tokens, row 0 first: consecutive positions."""
        return list(zip(*self.rows, strict=True))

    def advance(self, num_accepted: int, answers: list[int], root: int) -> None:
        """Move on to the new root, num_accepted + 1 positions further.

        answers: (k,) the target's picks below the first k columns of the last row; they become a row of their own.
        Law: every token keeps its absolute position. A full window drops its oldest row, so that each row moves one
        position on by itself; while it fills, the rows stay and lose one column more.
        """
        kept = self.rows[1:] if self.is_full else self.rows
        drop = num_accepted if self.is_full else num_accepted + 1
        rows = [row[drop:] for row in [*kept, answers]]
        rows[0][:1] = [root]
        width = self._width + self._num_rows - len(rows)
        self.rows = [filled(row, width, self._spare) for row in rows]
