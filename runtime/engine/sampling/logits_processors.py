"""The logits processors of docs/sampling.md, for all rows of a tree at once."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, MutableMapping, Sequence
from itertools import chain

import numpy as np

from orchestrator.core.arrays import BoolArray
from orchestrator.core.context import Context
from orchestrator.core.sampling_params import Sampling
from runtime.engine.sampling.changes import Changes

Path = Sequence[int]


class LogitsProcessors:
    """Changes the logits of one request as its sampling says; keeps token counts between steps.

    prompt_len: how many tokens of the context are prompt.
    Invariant: with these changes, a row is that of docs/sampling.md for the prompt, the output and the row's path.
    """

    def __init__(self, sampling: Sampling, prompt_len: int) -> None:
        self.sampling = sampling
        self._prompt_len = prompt_len
        self._counts = TokenCounts(prompt_len)

    def changes(
        self, context: Context, prefix_len: int, paths: Sequence[Path], legal: BoolArray | None = None
    ) -> Changes:
        """Return what the request changes in the logits of one tree, for `runtime.engine.sampling.changes.processed`.

        prefix_len: number of committed tokens of the context. paths: (n,), each row's tokens after the committed ones.
        legal: (n, V), whether the grammar allows the token there; None: no grammar.
        """
        counts = None
        if self.sampling.penalised:
            self._counts.update(context, prefix_len)
            counts = self._counts.along(paths)
        logits_options, ids = self.sampling.logits_options, context.ids[:prefix_len]
        bad_ends: list[Path] = []
        if words := logits_options.bad_words:
            recent = ids[-max(map(len, words)) :]
            bad_ends = [[word[-1] for word in words if completes(word, [*recent, *path])] for path in paths]
        early_ends: list[Path] = []
        num_early = self.sampling.min_tokens - (len(ids) - self._prompt_len)
        if num_early > 0 and logits_options.end_ids:
            early_ends = [logits_options.end_ids if len(path) < num_early else () for path in paths]
        return Changes(len(paths), self.sampling, counts, legal, bad_ends, early_ends)


def processors_for(sampling: Sampling, prompt_len: int, kept: LogitsProcessors | None) -> LogitsProcessors | None:
    """Return the processors of a request, or None if it has none.

    kept: the processors of the sequence's last step, which are returned if they have this sampling.
    """
    if not sampling.needs_logits_processors:
        return None
    if kept is not None and kept.sampling == sampling:
        return kept
    return LogitsProcessors(sampling, prompt_len)


class TokenCounts:
    """The tokens of a context, with their counts in its output.

    Python visits only the new tokens and those of the paths, because a context may have thousands of others.
    """

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._columns: dict[int, int] = {}  # token → its index in the arrays
        self._ids, self._counts = np.empty(0, np.int64), np.empty(0)
        self._length = self._hash = 0

    def update(self, context: Context, length: int) -> None:
        """Count the first `length` tokens, which are usually those of the last call and a few more."""
        if length < self._length or context.rolling_hash(self._length) != self._hash:
            self._columns, self._length = {}, 0
            self._ids, self._counts = self._ids[:0], self._counts[:0]
        new = self._placed(context.ids[self._length : length], self._columns)
        self._ids = np.concatenate([self._ids, np.array(new, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(len(new))])
        output = context.ids[max(self._length, self._prompt_len) : length]
        np.add.at(self._counts, np.array([self._columns[token] for token in output], np.intp), 1.0)
        self._length, self._hash = length, context.rolling_hash(length)

    def along(self, paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the counts at the end of each of n paths: tokens, occurs, counts.

        tokens: (k,) int64, the ids in the context or in any path. occurs: (n, k) bool, whether the token is in the
        context or in this path. counts: (n, k) float64, how often it is in the output and in this path.
        """
        columns: ChainMap[int, int] = ChainMap({}, self._columns)  # the tokens of the paths go into the first dict
        new = self._placed(chain.from_iterable(paths), columns)
        counts = np.tile(np.concatenate([self._counts, np.zeros(len(new))]), (len(paths), 1))
        occurs = np.tile(np.arange(counts.shape[1]) < len(self._ids), (len(paths), 1))
        for row, path in enumerate(paths):
            for token in path:
                counts[row, columns[token]] += 1
                occurs[row, columns[token]] = True
        return np.concatenate([self._ids, np.array(new, np.int64)]), occurs, counts

    def _placed(self, tokens: Iterable[int], columns: MutableMapping[int, int]) -> list[int]:
        """Give each token without a column the next one; return these tokens."""
        new: list[int] = []
        for token in tokens:
            if token not in columns:
                columns[token] = len(self._ids) + len(new)
                new.append(token)
        return new


def completes(word: Sequence[int], ids: Sequence[int]) -> bool:
    """Return True if the last token of `word`, appended to `ids`, would complete the word."""
    length = len(word) - 1
    if length == 0:
        return True
    if length > len(ids) or ids[-1] != word[-2]:  # almost every call ends here
        return False
    return tuple(ids[-length:]) == tuple(word[:-1])
