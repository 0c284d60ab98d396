"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last few tokens (Saxena 2023)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

from pydantic import Field

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.parameters import MethodConfig

# A token may occur ten thousand times in a long text; only this many places are looked at.
MAX_PLACES = 256
# A token costs about 150 bytes for each n, and a request with a long prompt must not fill the memory.
MAX_NGRAM = 8


class PromptLookupConfig(MethodConfig):
    """Which places are looked up, and how many of the tokens that followed are proposed.

    max_ngram: longest suffix looked up. draft_len: maximum tokens of a continuation.
    match: which of several places comes first; frequent = those with the most frequent next token.
    branches: maximum continuations; they differ in their first token.
    length: fixed = draft_len tokens; grown = twice as many tokens as agree before the place.
    clip: where the text ends before the continuation does, end it there (true), go on with its own copy (false), or
    skip the place, as in the first published version (skip).
    """

    max_ngram: int = Field(3, ge=1, le=MAX_NGRAM)
    draft_len: int = Field(20, ge=1, le=MAX_NODES)
    match: Literal["recent", "frequent", "leftmost"] = "recent"
    branches: int = Field(1, ge=1, le=16)
    length: Literal["fixed", "grown"] = "grown"
    clip: bool | Literal["skip"] = False

    @property
    def is_chain(self) -> bool:
        """True when there is one continuation."""
        return self.branches == 1


class NgramIndex:
    """The places of all n-grams of 1…max_ngram tokens of a growing text that have a continuation.

    A place is the position of the token that follows. Costs O(max_ngram) time and memory per token.
    """

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def extend(self, ids: Sequence[int]) -> None:
        """Add the n-grams that are new since the last call, except those at the end of the text."""
        for end in range(self._num_indexed + 1, len(ids)):
            for size in range(1, min(self._max_ngram, end) + 1):
                self._places.setdefault(tuple(ids[end - size : end]), []).append(end)
        self._num_indexed = len(ids) - 1

    def matches(self, ids: Sequence[int], min_ngram: int = 1) -> Iterator[list[int]]:
        """Yield the places of the longest suffix of `ids` that occurs in the text, ascending; then of each shorter one.

        min_ngram: tokens of the shortest suffix that is looked up.
        """
        for size in range(min(self._max_ngram, len(ids)), min_ngram - 1, -1):
            if places := self._places.get(tuple(ids[-size:])):
                yield places


class PromptLookup(Proposer):
    """Proposes the continuations of earlier occurrences of the longest matching suffix.

    Costs O(max_ngram) per new token and O(branches · draft_len + MAX_PLACES) per proposal, however long the text.
    Source: prompt lookup decoding, Saxena 2023; docs/methods/prompt_lookup.md.
    """

    name = "prompt_lookup"

    def __init__(self, config: PromptLookupConfig, dependencies: ProposerDependencies) -> None:
        self._config = config
        self._index = NgramIndex(config.max_ngram)

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return a chain, several branches, or a bare root when no suffix occurred before."""
        self._index.extend(context.ids)
        longest = budget.clipped(self._config.draft_len)
        starts = list(islice(self._starts(context.ids), self._config.branches if longest else 0))
        paths = [continuation(context.ids, start, self._length(context.ids, start, longest)) for start in starts]
        return Proposal.of(TokenTree.from_paths(paths), self.name)

    def _starts(self, ids: list[int]) -> Iterator[int]:
        """Yield where continuations start, the best first, each with a different first token."""
        seen: set[int] = set()
        for places in self._index.matches(ids):
            for start in self._ordered(places, ids):
                if ids[start] not in seen and not self._is_skipped(start, len(ids)):
                    seen.add(ids[start])
                    yield start

    def _ordered(self, places: list[int], ids: list[int]) -> list[int]:
        """Return at most MAX_PLACES places in the order of `match`; of equally frequent ones the most recent first."""
        ordered = list(islice(places if self._config.match == "leftmost" else reversed(places), MAX_PLACES))
        if self._config.match != "frequent":
            return ordered
        counts = Counter(ids[start] for start in ordered)
        return sorted(ordered, key=lambda start: -counts[ids[start]])

    def _is_skipped(self, start: int, num_tokens: int) -> bool:
        return self._config.clip == "skip" and start + self._config.draft_len > num_tokens

    def _length(self, ids: list[int], start: int, longest: int) -> int:
        if self._config.length == "grown":
            longest = min(longest, 2 * agreement(ids, start, longest))
        return min(longest, len(ids) - start) if self._config.clip is True else longest


def agreement(ids: list[int], start: int, most: int) -> int:
    """Return how many tokens before `start` equal those at the end of ids, at most `most`."""
    count = 0
    while count < min(most, start) and ids[start - 1 - count] == ids[-1 - count]:
        count += 1
    return count


def continuation(ids: list[int], start: int, length: int) -> list[int]:
    """Return `length` tokens from ids[start:], which is repeated when it ends, as in LZ77.

    So the draft of a text that repeats with period d can be longer than d tokens.
    """
    period = len(ids) - start
    return [ids[start + i % period] for i in range(length)]
