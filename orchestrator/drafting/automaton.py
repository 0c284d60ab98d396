"""A suffix automaton over token sequences, grown token by token; it knows neither requests nor drafting.

A state stands for all strings that end at the same places. The longest of them has `len` tokens, and the shortest has
one more than the longest of the state `link`, which holds the next shorter suffix.
Source: Blumer et al. 1985; over several sequences: Mohri et al. 2009 (general suffix automaton).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

ROOT = 0
# Half the vocabulary may follow a short string; this limit keeps it from costing more than a long one.
MAX_FOLLOWERS = 256


class Match(NamedTuple):
    """A string that occurs in the text: its state and its length; state ROOT is the empty string."""

    state: int
    length: int


class Latest(NamedTuple):
    """The token seen last after a string, how often it was seen there, and its share of all that followed."""

    token: int
    times: int
    share: float


class Follower(NamedTuple):
    """A token seen after a string: how often, and where it was seen last."""

    token: int
    times: int
    end: int


class Automaton:
    """All substrings of one or more sequences; a token costs O(1) amortised and at most max_depth + 1 increments.

    max_depth: longest string that is matched. Counts of occurrences are exact for strings of up to max_depth + 1
    tokens: matched strings with one token after them.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.num_tokens = 0
        # By state: the longest string's length, the suffix link, and {token: state after it}.
        self._len, self._link = [0], [-1]
        self._next: list[dict[int, int]] = [{}]
        # By state: occurrences, the position after the last one, occurrences at the end of an earlier sequence, and the
        # token after the last occurrence that has one.
        self._count, self._end, self._ended, self._latest = [0], [0], [0], [-1]
        self._whole = ROOT  # the state of the whole current sequence
        self._recent = Match(ROOT, 0)  # its last max_depth tokens

    def begin(self) -> None:
        """Begin another sequence; no string runs across two."""
        state = self._recent.state
        while state != ROOT:  # each suffix of the sequence that ends here occurs once without a follower
            self._ended[state] += 1
            state = self._link[state]
        self._whole, self._recent = ROOT, Match(ROOT, 0)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the current sequence."""
        for token in tokens:
            self._append(token)

    def repeated(self) -> Match:
        """Return the longest suffix, of at most max_depth tokens, that occurred before.

        The automaton must hold a single sequence.
        """
        if self._whole == ROOT:
            return Match(ROOT, 0)
        earlier = self._link[self._whole]
        if self._len[earlier] < self.max_depth:
            return Match(earlier, self._len[earlier])
        return self._recent

    def find(self, tokens: Sequence[int]) -> Match:
        """Return the longest suffix of `tokens`, of at most max_depth tokens, that occurs with a token after it."""
        match = Match(ROOT, 0)
        for token in tokens[-self.max_depth :]:
            match = self._matched(match, token)
        return self._continuing(match)

    def follow(self, match: Match, token: int) -> Match:
        """Return the match with one of its followers after it, cut to its last max_depth tokens.

        Where the text ends, return the longest suffix that continues, so that a repetition is followed beyond its end.
        """
        return self._continuing(self._cut(Match(self._next[match.state][token], match.length + 1)))

    def after(self, match: Match, token: int) -> Match:
        """Return the longest suffix of a match and `token`, of at most max_depth tokens, that has a follower."""
        return self._continuing(self._cut(self._matched(match, token)))

    def shorter(self, match: Match) -> Match:
        """Return the longest suffix of a match that occurs at more places."""
        link = self._link[match.state]
        return Match(link, self._len[link])

    def latest(self, match: Match) -> Latest:
        """Return the token that followed the string last; the string must have a follower."""
        token = self._latest[match.state]
        times = self._count[self._next[match.state][token]]
        return Latest(token, times, times / self.continued(match))

    def followers(self, match: Match) -> list[Follower]:
        """Return the first MAX_FOLLOWERS tokens that followed the string, in the order in which they were first seen.

        Invariant: a count is that of the string with the token after it.
        """
        seen = islice(self._next[match.state].items(), MAX_FOLLOWERS)
        return [Follower(token, self._count[state], self._end[state]) for token, state in seen]

    def continued(self, match: Match) -> int:
        """Return how often a token followed the non-empty string; it does not where a sequence ends with the string."""
        ends_here = self._whole != ROOT and self._end[match.state] == self.num_tokens
        return self._count[match.state] - self._ended[match.state] - ends_here

    def _append(self, token: int) -> None:
        self.num_tokens += 1
        last = self._whole
        if token in self._next[last]:  # only when another sequence began with the same tokens
            self._whole = self._split(last, token)
        else:
            self._whole = self._new_state(self._len[last] + 1)
            while last >= 0 and token not in self._next[last]:
                self._next[last][token] = self._whole
                last = self._link[last]
            self._link[self._whole] = self._split(last, token) if last >= 0 else ROOT
        self._count_up(token)

    def _split(self, state: int, token: int) -> int:
        """Return the state whose longest string is that of `state` and `token`; split a longer one if necessary."""
        longer = self._next[state][token]
        length = self._len[state] + 1
        if self._len[longer] == length:
            return longer
        clone = self._new_state(length)
        self._next[clone] = dict(self._next[longer])
        self._link[clone], self._link[longer] = self._link[longer], clone
        self._count[clone], self._end[clone] = self._count[longer], self._end[longer]
        self._ended[clone], self._latest[clone] = self._ended[longer], self._latest[longer]
        while state >= 0 and self._next[state].get(token) == longer:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, length: int) -> int:
        self._len.append(length)
        self._link.append(ROOT)
        self._next.append({})
        for numbers in (self._count, self._end, self._ended):
            numbers.append(0)
        self._latest.append(-1)
        return len(self._len) - 1

    def _count_up(self, token: int) -> None:
        """Note the token as the latest after the strings before it; count suffixes of up to max_depth + 1 tokens."""
        before = self._recent.state
        while before != ROOT:
            self._latest[before] = token
            before = self._link[before]
        state = self._next[self._recent.state][token]  # the same for both halves of a state that was just split
        self._recent = self._cut(Match(state, self._recent.length + 1))
        while state != ROOT:
            self._count[state] += 1
            self._end[state] = self.num_tokens
            state = self._link[state]

    def _cut(self, match: Match) -> Match:
        """Return the last max_depth tokens of a match that is at most one token longer."""
        if match.length <= self.max_depth:
            return match
        shorter = self._link[match.state]
        return Match(shorter if self._len[shorter] >= self.max_depth else match.state, self.max_depth)

    def _continuing(self, match: Match) -> Match:
        """Return the longest suffix of a match that has a follower."""
        state, length = match
        while not self._next[state] and state != ROOT:
            state = self._link[state]
            length = self._len[state]
        return Match(state, length)

    def _matched(self, match: Match, token: int) -> Match:
        """Return the longest suffix of a match and `token` that occurs."""
        state, length = match
        while token not in self._next[state]:
            if state == ROOT:
                return Match(ROOT, 0)
            state = self._link[state]
            length = self._len[state]
        return Match(self._next[state][token], length + 1)
