"""Earlier responses of this server, to draft from: limited in size, and separate for each cache salt."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from native.response_memory import NativeMemory, native_memory
from orchestrator.drafting.automaton import Automaton, Match

MAX_DEPTH = 64
# Responses are forgotten a segment at a time; a segment has at most a quarter of the bound, so some always stay.
NUM_SEGMENTS = 4
# A short automaton costs more memory than its tokens; this bounds clients that never use a salt twice.
MAX_SEGMENTS = 4096
# About 0.3 ms under the lock, for which a proposal may have to wait.
PIECE_TOKENS = 64

T = TypeVar("T")


class Segment(NamedTuple):
    """Responses of one salt, learnt one by one and forgotten together."""

    salt: str
    text: Automaton


class Memory:
    """Responses of one server process; every method may be called from any thread.

    It is the reference for `native/drafts/response_memory.h`, and is used where that cannot be compiled.

    max_tokens: maximum tokens held, over all salts.
    Invariant: a match for a salt comes from one response that was learnt for the same salt.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._oldest_first: deque[Segment] = deque()
        self._by_salt: dict[str, list[Automaton]] = {}
        self._lock = threading.Lock()
        self._learning = threading.Lock()

    def of(self, salt: str) -> Recollection:
        """Return the responses that a request with this salt may draft from."""
        return Recollection(self, salt)

    def learn(self, salt: str, tokens: Sequence[int]) -> None:
        """Add a response in pieces, so that proposals can go on; if it exceeds max_tokens, only its end."""
        tokens = tokens[-self._max_tokens :]
        if not tokens:
            return
        with self._learning:
            text = self._begin(salt, len(tokens))
            for start in range(0, len(tokens), PIECE_TOKENS):
                with self._lock:
                    text.extend(tokens[start : start + PIECE_TOKENS])
                time.sleep(0)  # otherwise this thread may take the lock again before a waiting one wakes up

    @contextmanager
    def texts(self, salt: str) -> Iterator[list[Automaton]]:
        """Lock the memory and yield the automata of a salt, the newest first."""
        with self._lock:
            yield self._by_salt.get(salt, [])[::-1]

    def _begin(self, salt: str, num_tokens: int) -> Automaton:
        """Make room for a response of `num_tokens` and return the automaton to add it to."""
        with self._lock:
            while self.num_tokens + num_tokens > self._max_tokens or len(self._oldest_first) >= MAX_SEGMENTS:
                self._forget_oldest()
            self.num_tokens += num_tokens
            texts = self._by_salt.setdefault(salt, [])
            if not texts or texts[-1].num_tokens + num_tokens > self._max_tokens // NUM_SEGMENTS:
                texts.append(Automaton(MAX_DEPTH))
                self._oldest_first.append(Segment(salt, texts[-1]))
            texts[-1].begin()
            return texts[-1]

    def _forget_oldest(self) -> None:
        salt, text = self._oldest_first.popleft()
        self.num_tokens -= text.num_tokens
        self._by_salt[salt].remove(text)
        if not self._by_salt[salt]:
            del self._by_salt[salt]


#: The memory of a process: in native code, or the reference.
ResponseMemory = Memory | NativeMemory


def new_memory(max_tokens: int) -> ResponseMemory:
    """Return a memory without responses, in native code if that can be compiled."""
    return native_memory(max_tokens) or Memory(max_tokens)


class Recollection(NamedTuple):
    """The earlier responses that one request may draft from: those of its own salt."""

    memory: Memory
    salt: str

    def longest(self, tokens: Sequence[int], use: Callable[[Automaton, Match], T]) -> T | None:
        """Return use(text, match) for the longest suffix of `tokens` that occurs, in the newest text among equals.

        use: must be quick, since it runs under the memory's lock; it is not called if nothing matches.
        """
        with self.memory.texts(self.salt) as texts:
            found = [(text, text.find(tokens)) for text in texts]
            text, match = max(found, key=lambda pair: pair[1].length, default=(None, None))
            return use(text, match) if text and match and match.length else None

    def followers(self, context: Sequence[int]) -> Counter[int]:
        """Return {token: how often it followed all of `context`}, of at most MAX_DEPTH tokens."""
        counts: Counter[int] = Counter()
        with self.memory.texts(self.salt) as texts:
            for text in texts:
                match = text.find(context)
                if 0 < match.length == len(context):
                    counts.update({follower.token: follower.times for follower in text.followers(match)})
        return counts
