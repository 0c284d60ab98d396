"""Prompt lookup: what followed the last few tokens the last time they stood in the text (Saxena 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.settings import MAX_NODES, MethodConfig, whole
from orchestrator.tree import TokenTree
from orchestrator.types import Acceptance, Budget, Context, Proposal, Sampling, Want


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(MethodConfig):
    """max_ngram: longest suffix looked up. draft_len: tokens proposed."""

    max_ngram: int = whole(3, 1, 32)
    draft_len: int = whole(10, 1, MAX_NODES)


class PromptLookup:
    """Proposes the continuation of the most recent earlier occurrence of the longest matching suffix.

    max_ngram: longest suffix that is looked up; shorter ones are tried down to one token.
    draft_len: length of the continuation. Costs O(max_ngram) per new token and O(draft_len) per proposal.
    Source: prompt lookup decoding, Saxena 2023; docs/methods/prompt_lookup.md.
    """

    name = "prompt_lookup"
    want = Want()

    def __init__(self, config: PromptLookupConfig) -> None:
        self._max_ngram = config.max_ngram
        self._draft_len = config.draft_len
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return a chain, or a bare root when no suffix occurred before."""
        self._index(context.ids)
        start = self._find(context.ids)
        length = budget.clipped(self._draft_len)
        if start is None or not length:
            return Proposal.none()
        return Proposal.chain(continuation(context.ids, start, length), self.name)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Learn nothing: the context says it all."""

    def close(self) -> None:
        """Hold nothing."""

    def _index(self, ids: list[int]) -> None:
        """Note where each n-gram that has a continuation ended last: all but those that end in the root."""
        for end in range(self._num_indexed + 1, len(ids)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(ids[end - size : end])] = end
        self._num_indexed = len(ids) - 1

    def _find(self, ids: list[int]) -> int | None:
        for size in range(min(self._max_ngram, len(ids)), 0, -1):
            end = self._ends.get(tuple(ids[-size:]))
            if end is not None:
                return end
        return None


def continuation(ids: list[int], start: int, length: int) -> list[int]:
    """Return `length` tokens of ids[start:], which goes on into its own copy when it reaches the end.

    A text that repeats with period d is thus drafted beyond d tokens, as in LZ77.
    """
    period = len(ids) - start
    copied = ids[start : start + length]
    return [copied[i] if i < period else copied[i % period] for i in range(length)]
