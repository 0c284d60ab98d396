"""What this server has answered before, to draft from: bounded, first in first out, apart by cache salt."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from orchestrator.proposers.automaton import Automaton, Match

MAX_DEPTH = 64
# A salt's generations have a quarter of the bound each, so that it is not met by forgetting all.
NUM_GENERATIONS = 4
# An automaton costs more than its tokens when these are few: a bound for clients that never use a salt twice.
MAX_GENERATIONS = 4096
# About 0.3 ms under the lock: what a proposal may have to wait.
PIECE_TOKENS = 64

T = TypeVar("T")


class Generation(NamedTuple):
    """Responses of one salt, learnt one after the other and forgotten at once."""

    salt: str
    text: Automaton


class Memory:
    """Responses of one server process; every method may be called from any thread.

    max_tokens: most tokens held, over all salts.
    Invariant: what is looked up for a salt comes from responses learnt for that very salt, and runs across no two of them.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._oldest_first: deque[Generation] = deque()
        self._by_salt: dict[str, list[Automaton]] = {}
        self._lock = threading.Lock()
        self._learning = threading.Lock()

    def of(self, salt: str) -> Recollection:
        """Return what a request with this salt may draft from."""
        return Recollection(self, salt)

    def learn(self, salt: str, tokens: Sequence[int]) -> None:
        """Add a response; of one beyond the bound only the end. Proposals go on between its pieces."""
        tokens = tokens[-self._max_tokens :]
        if not tokens:
            return
        with self._learning:
            text = self._begin(salt, len(tokens))
            for start in range(0, len(tokens), PIECE_TOKENS):
                with self._lock:
                    text.extend(tokens[start : start + PIECE_TOKENS])
                time.sleep(0)  # else this thread may take the lock again before one that waits wakes up

    @contextmanager
    def texts(self, salt: str) -> Iterator[list[Automaton]]:
        """Hold the automata of a salt still, the newest first."""
        with self._lock:
            yield self._by_salt.get(salt, [])[::-1]

    def _begin(self, salt: str, num_tokens: int) -> Automaton:
        """Make room for a response of `num_tokens` and return the automaton that takes it."""
        with self._lock:
            while self.num_tokens + num_tokens > self._max_tokens or len(self._oldest_first) >= MAX_GENERATIONS:
                self._forget_oldest()
            self.num_tokens += num_tokens
            texts = self._by_salt.setdefault(salt, [])
            if not texts or texts[-1].num_tokens + num_tokens > self._max_tokens // NUM_GENERATIONS:
                texts.append(Automaton(MAX_DEPTH))
                self._oldest_first.append(Generation(salt, texts[-1]))
            texts[-1].begin()
            return texts[-1]

    def _forget_oldest(self) -> None:
        salt, text = self._oldest_first.popleft()
        self.num_tokens -= text.num_tokens
        self._by_salt[salt].remove(text)
        if not self._by_salt[salt]:
            del self._by_salt[salt]


class Recollection:
    """The earlier responses that one request may draft from: those of its own salt."""

    def __init__(self, memory: Memory, salt: str) -> None:
        self._memory = memory
        self._salt = salt

    def longest(self, tokens: Sequence[int], use: Callable[[Automaton, Match], T]) -> T | None:
        """Return what `use` makes of the longest suffix of `tokens` that occurs, in the newest generation of equals.

        `use` runs under the memory's lock; it must be short. None when nothing matches.
        """
        with self._memory.texts(self._salt) as texts:
            found = [(text, text.find(tokens)) for text in texts]
            text, match = max(found, key=lambda pair: pair[1].length, default=(None, None))
            return use(text, match) if text and match and match.length else None

    def followers(self, context: Sequence[int]) -> Counter[int]:
        """Return {token: how often it followed all of `context`}, of at most MAX_DEPTH tokens."""
        counts: Counter[int] = Counter()
        with self._memory.texts(self._salt) as texts:
            for text in texts:
                match = text.find(context)
                if 0 < match.length == len(context):
                    counts.update({follower.token: follower.times for follower in text.followers(match)})
        return counts
