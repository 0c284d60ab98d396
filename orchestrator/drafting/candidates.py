"""Candidates for the next token, each with its evidence: from texts, from token statistics, from a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from native.drafts import LikeliestFollowers
from orchestrator.core.context import Context
from orchestrator.core.derived import derived_once
from orchestrator.drafting.automaton import ROOT, Automaton, Match
from orchestrator.drafting.corpus import Corpus
from orchestrator.drafting.memory import MAX_DEPTH, Recollection
from orchestrator.drafting.predicted import Predicted
from orchestrator.drafting.tables import MAX_ORDER, Level, Tables, packed

#: Longest suffix of the text that is looked up; longer agreement tells nothing more.
MAX_MATCH = 24
#: Evidence distinguishes lengths of agreement up to this one; beyond it, only whether they are 1.5 times as long.
MAX_LENGTH = 8
#: Added to the evidence of a token that only the next shorter suffix names.
OF_SHORTER = 1000


class Candidate(NamedTuple):
    """A token that may come next. evidence: candidates of one source with the same evidence share an estimate."""

    token: int
    evidence: int


class CandidateSource(Protocol):
    """Names candidates after the committed text and after every continuation of it.

    A state is what the source knows after a continuation, or None if it knows nothing.
    """

    name: str

    def start(self, context: Context) -> Any:
        """Return the state after the committed text."""

    def after(self, state: Any, token: int) -> Any:
        """Return the state after one more token."""

    def candidates(self, state: Any) -> Sequence[Candidate]:
        """Return candidates with different tokens, the likeliest first."""

    def prior(self, evidence: int) -> float:
        """Return the probability of a candidate with this evidence before any outcome is known."""


class TextCandidates:
    """What last followed the longest suffix that occurred before, and what last followed the next shorter one.

    A token costs O(MAX_MATCH) to read, and a candidate O(1).
    """

    name = "suffix"

    def __init__(self) -> None:
        self._text = Automaton(MAX_MATCH)

    def start(self, context: Context) -> Match | None:
        """Read the new tokens, and return the longest suffix that occurred before."""
        self._text.extend(context.ids[self._text.num_tokens :])
        match = self._text.repeated()
        return None if match.state == ROOT else match

    def after(self, state: Match | None, token: int) -> Match | None:
        """Return the longest suffix that ends with the token and has a follower."""
        match = self._text.after(state or Match(ROOT, 0), token)
        return None if match.state == ROOT else match

    def candidates(self, state: Match | None) -> Sequence[Candidate]:
        """Return at most two candidates; the one that the shorter suffix adds has evidence of its own."""
        if state is None:
            return ()
        found, shorter = [_latest(self._text, state)], self._text.shorter(state)
        if shorter.state != ROOT:
            token, evidence = _latest(self._text, shorter)
            if token != found[0].token:
                found.append(Candidate(token, OF_SHORTER + evidence))
        return found

    def prior(self, evidence: int) -> float:
        """Return the probability that the length of the agreement gives, halved for a token of the shorter suffix."""
        return _text_prior(evidence % OF_SHORTER) * (0.5 if evidence >= OF_SHORTER else 1.0)


def _text_prior(evidence: int) -> float:
    """Return L / (L + 1.5) for an agreement of L tokens."""
    length = evidence // 20
    return length / (length + 1.5)


def _text_evidence(length: int, share: float, times: int) -> int:
    """Return one number for the length of an agreement, the token's share in quarters, and its count up to 4."""
    return 20 * _length_of(length) + 4 * int(4 * share) + min(times, 4) - 1


def _length_of(length: int) -> int:
    """Return the length of an agreement as far as evidence distinguishes it."""
    return min(length, MAX_LENGTH) if length < MAX_LENGTH * 3 // 2 else MAX_LENGTH + 1


def _latest(text: Automaton, match: Match) -> Candidate:
    """Return the token that followed a match last."""
    latest = text.latest(match)
    return Candidate(latest.token, _text_evidence(match.length, latest.share, latest.times))


class LastTokens:
    """The base of the sources that look up the last tokens, which are their state.

    num_of_text: how many of the text's last tokens the state begins with. max_tokens: the maximum once a continuation
    follows them.
    """

    num_of_text = max_tokens = MAX_MATCH

    def start(self, context: Context) -> tuple[int, ...]:
        """Return the last tokens."""
        return tuple(context.ids[-self.num_of_text :])

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        """Return the last tokens after one more."""
        return (*state, token)[-self.max_tokens :]

    def prior(self, evidence: int) -> float:
        """Return the probability that a token from the request's own text would have."""
        return _text_prior(evidence)


class MemoryCandidates(LastTokens):
    """What last followed the longest suffix of the text that occurs in an earlier response of the same salt."""

    name = "memory"
    max_tokens = MAX_DEPTH

    def __init__(self, memory: Recollection) -> None:
        self._memory = memory

    def candidates(self, state: tuple[int, ...]) -> Sequence[Candidate]:
        """Return the latest follower."""
        found = self._memory.longest(state, _latest)
        return () if found is None else (found,)


class CorpusCandidates(LastTokens):
    """What most often followed the longest suffix of the text that occurs in the deployment's corpus."""

    name = "corpus"

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def candidates(self, state: tuple[int, ...]) -> Sequence[Candidate]:
        """Return the most frequent follower."""
        found = self._corpus.likeliest(state, MAX_MATCH)
        if found is None:
            return ()
        return (Candidate(found.token, _text_evidence(found.length, found.times / found.num_places, found.times)),)


class TableCandidates(LastTokens):
    """The most frequent follower of the last tokens in the deployment's token statistics."""

    name = "ngram"
    num_of_text = max_tokens = MAX_ORDER - 1

    def __init__(self, tables: Tables) -> None:
        self._levels, self._vocab_size = likeliest_followers(tables), tables.vocabulary.size

    def candidates(self, state: tuple[int, ...]) -> Sequence[Candidate]:
        """Return the candidate after the longest known context that ends here, if there is one."""
        for length in range(min(len(state), len(self._levels)), 0, -1):
            level, key = self._levels[length - 1], packed(state[-length:], self._vocab_size)
            row = int(level.keys.searchsorted(key))
            if row < len(level.keys) and level.keys[row] == key:
                return (Candidate(int(level.tokens[row]), int(level.evidence[row])),)
        return ()

    def prior(self, evidence: int) -> float:
        """Return half the token's share of what followed."""
        return 0.1 * (evidence % 10 // 2)


@derived_once
def likeliest_followers(tables: Tables) -> tuple[LikeliestFollowers, ...]:
    """Return the most frequent follower of each context of 1, 2, … tokens, the lowest id among equals.

    Evidence: 10 × length of the context + 2 × the follower's share in fifths + 1 if the context occurred at least 4 ×.
    """
    return tuple(_likeliest(level, length) for length, level in enumerate(tables.levels[1:], start=1))


def _likeliest(level: Level, length: int) -> LikeliestFollowers:
    starts, weights = level.starts[:-1].astype(np.int64), level.weights.astype(np.float64)
    if not len(starts):
        return LikeliestFollowers(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32))
    most, totals = np.maximum.reduceat(weights, starts), np.add.reduceat(weights, starts)
    contexts = np.repeat(np.arange(len(starts)), np.diff(level.starts.astype(np.int64)))
    _, first = np.unique(contexts[is_most := weights == most[contexts]], return_index=True)
    tokens = level.ids[np.flatnonzero(is_most)[first]].astype(np.int32)
    evidence = 10 * length + 2 * (4.99 * most / totals).astype(np.int32) + (totals >= 4)
    return LikeliestFollowers(level.keys.astype(np.int64), tokens, evidence.astype(np.int32))


class Place(NamedTuple):
    """A place in a prediction, and how many tokens before it agree with the text."""

    at: int
    agreement: int


class PredictionCandidates:
    """The next token of the client's prediction, as long as the prediction fits."""

    name = "predicted"

    def __init__(self, predicted: Predicted) -> None:
        self._predicted = predicted

    def start(self, context: Context) -> Place | None:
        """Follow the new tokens through the prediction, and return the place of the next one."""
        if not self._predicted.follow(context) or self._predicted.expected == len(self._predicted.prediction):
            return None
        ids, end = self._predicted.prediction, self._predicted.expected
        most = min(end, len(context), 2 * MAX_LENGTH)
        return Place(end, next((n for n in range(most) if ids[end - 1 - n] != context.ids[-1 - n]), most))

    def after(self, state: Place | None, token: int) -> Place | None:
        """Return the next place in the prediction if the token agrees with it."""
        ids = self._predicted.prediction
        if state is None or ids[state.at] != token or state.at + 1 == len(ids):
            return None
        return Place(state.at + 1, state.agreement + 1)

    def candidates(self, state: Place | None) -> Sequence[Candidate]:
        """Return the next token of the prediction."""
        return () if state is None else (Candidate(self._predicted.prediction[state.at], _length_of(state.agreement)),)

    def prior(self, evidence: int) -> float:
        """Return (L + 1) / (L + 2) for an agreement of L tokens."""
        return (evidence + 1) / (evidence + 2)
