"""The torch twin of `orchestrator/sampling/logits_processors.py`: one request's rows at once, each with its own node's path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.sampling_params import Sampling
from orchestrator.sampling.grammar import Grammars
from orchestrator.sampling.grammar_matcher import Matcher
from orchestrator.sampling.logits_processors import completes
from orchestrator.wire.context import Delta

Path = Sequence[int]


class Shapable(Protocol):
    """What keeps a shaper from step to step."""

    logits_processors: LogitsProcessors | None


class LogitsProcessors:
    """Changes the logits of one request as its sampling says; keeps what it knows of the committed tokens.

    prompt_len: tokens of the context that are prompt. matcher: where the output stands in its grammar, if it has one.
    Invariant: a row equals `orchestrator.sampling.logits_processors.shape` of prompt, output + path.
    """

    def __init__(self, sampling: Sampling, prompt_len: int, matcher: Matcher | None) -> None:
        self.sampling = sampling
        self._prompt_len = prompt_len
        self._matcher = matcher
        self._said = TokenCounts(prompt_len)

    def apply(self, logits: Tensor, context: Context, prefix_len: int, paths: Sequence[Path]) -> None:
        """Change (n, V) float64 logits in place.

        prefix_len: tokens of the context that are committed. paths: n, what stands between those and a row's position.
        """
        ids = context.ids[:prefix_len]
        if self.sampling.penalised:
            self._said.follow(context, prefix_len)
            self._penalise(logits, paths)
        for token, weight in self.sampling.logits_options.bias:
            logits[:, token] += weight
        for forbidden in self._masks(logits, ids, paths):
            masked = logits.masked_fill(forbidden, -torch.inf)
            something_left = masked.isfinite().any(dim=-1, keepdim=True)
            logits.copy_(torch.where(something_left, masked, logits))

    def _penalise(self, logits: Tensor, paths: Sequence[Path]) -> None:
        """Touch the columns of tokens that were said only; of a path's tokens, in the rows that follow them."""
        tokens, said, counts = self._said.along(paths)
        columns = torch.from_numpy(tokens).to(logits.device)
        was_said, times = (torch.from_numpy(x).to(logits.device) for x in (said, counts))
        found = logits[:, columns]
        penalty = self.sampling.repetition_penalty
        repeated = torch.where(found > 0, found / penalty, found * penalty)
        changed = torch.where(was_said, repeated, found)
        changed -= self.sampling.frequency_penalty * times
        changed -= self.sampling.presence_penalty * (times > 0)
        logits[:, columns] = changed

    def _masks(self, logits: Tensor, ids: list[int], paths: Sequence[Path]) -> list[Tensor]:
        """Return what each mask forbids, (n, V) or (1, V) bool."""
        logits_options, device = self.sampling.logits_options, logits.device
        vocab_size, masks = logits.shape[-1], []
        if self._matcher:
            self._matcher.follow(ids[self._prompt_len :])
            legal = np.stack([self._matcher.legal(path) for path in paths])
            masks.append(torch.from_numpy(~legal).to(device))
        if logits_options.allowed:
            masks.append(~_members([logits_options.allowed], vocab_size, device))
        if logits_options.bad_words:
            masks.append(_members([self._bad_ends(ids, path) for path in paths], vocab_size, device))
        if len(ids) - self._prompt_len < self.sampling.min_tokens and logits_options.end_ids:
            masks.append(_members([self._held_ends(ids, path) for path in paths], vocab_size, device))
        return masks

    def _bad_ends(self, ids: list[int], path: Path) -> list[int]:
        """Return the tokens that would complete a bad word behind the path."""
        words = self.sampling.logits_options.bad_words
        longest = max(map(len, words))
        recent = [*ids[-longest:], *path]
        return [word[-1] for word in words if completes(word, recent)]

    def _held_ends(self, ids: list[int], path: Path) -> Sequence[int]:
        """Return the ends that may not come yet."""
        num_output = len(ids) - self._prompt_len + len(path)
        return self.sampling.logits_options.end_ids if num_output < self.sampling.min_tokens else ()


def logits_processors_of(
    sequence: Shapable, sampling: Sampling, prompt_len: int, grammars: Grammars | None
) -> LogitsProcessors | None:
    """Return what changes the logits of a sequence, that of its last step where there was one; None when nothing does.

    grammars: of the checkpoint; None when there are none. Raises RequestError for a grammar that cannot be followed.
    """
    if not sampling.shaped:
        return None
    if sequence.logits_processors is None or sequence.logits_processors.sampling != sampling:
        sequence.logits_processors = LogitsProcessors(sampling, prompt_len, _matcher(sampling, grammars))
    return sequence.logits_processors


def preparation(delta: Delta, sampling: Sampling, grammars: Grammars | None) -> Callable[[], None] | None:
    """Return what had better be done before the engine's thread meets a new sequence: a grammar is to be compiled."""
    grammar = sampling.logits_options.grammar
    if grammar is None or grammars is None or delta.context_start or grammars.is_ready(grammar):
        return None
    return partial(grammars.check, grammar)


def _matcher(sampling: Sampling, grammars: Grammars | None) -> Matcher | None:
    logits_options = sampling.logits_options
    if logits_options.grammar is None:
        return None
    if grammars is None:
        raise RequestError("this engine was started without a tokenizer, which a grammar needs")
    return grammars.matcher(logits_options.grammar, logits_options.end_ids)


def _members(rows: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Return (len(rows), V) bool, True at the ids of each row."""
    members = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for row, ids in zip(members, rows, strict=True):
        row[list(ids)] = True
    return members.to(device)


class TokenCounts:
    """Which tokens a context holds, and how often its output does; O(new tokens) to keep up."""

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._counts: dict[int, int] = {}
        self._length = 0
        self._hash = 0

    def follow(self, context: Context, length: int) -> None:
        """Take in the first `length` tokens, which as a rule are those of the last call and a few more."""
        if length < self._length or context.rolling_hash(self._length) != self._hash:
            self._counts, self._length = {}, 0
        for position in range(self._length, length):
            token, in_output = context.ids[position], position >= self._prompt_len
            self._counts[token] = self._counts.get(token, 0) + in_output
        self._length, self._hash = length, context.rolling_hash(length)

    def along(self, paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what was said at the end of each path.

        Returns tokens (k,) int64; said (n, k) bool; counts (n, k) float64, how often in output and path.
        """
        column = {token: index for index, token in enumerate([*self._counts])}
        for path in paths:
            for token in path:
                column.setdefault(token, len(column))
        known = np.array([self._counts.get(token, 0) for token in column], np.float64)
        counts = np.tile(known, (len(paths), 1))
        said = np.tile([token in self._counts for token in column], (len(paths), 1))
        for row, path in enumerate(paths):
            for token in path:
                counts[row, column[token]] += 1
                said[row, column[token]] = True
        return np.array([*column], np.int64), said, counts
