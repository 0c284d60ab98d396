"""Where one output stands in its grammar: which tokens may come next, on every path of a token tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from orchestrator.core.errors import RequestError
from orchestrator.core.tree import TokenTree

BoolArray = npt.NDArray[np.bool_]
Result = TypeVar("Result")

GUIDE = "input guided_decoding_guide"


class Exhausted(RequestError):
    """The library hit a limit that others may have brought it to; what it answered last is worth nothing."""


class Vocabulary(NamedTuple):
    """The library's tokenizer, and the first byte of each of its tokens, (n,) int16; -1 where it holds no text."""

    tokenizer: LLTokenizer
    first_bytes: npt.NDArray[np.int16]


class Matcher:
    """Where the output of one request stands in its grammar; one thread at a time.

    Invariant: what is answered is a function of grammar, output and path alone, not of what was asked before.
    An output that broke the grammar, or has ended, binds nothing any more: every token is legal behind it.
    Methods raise RequestError when the grammar grows too complex mid-way; the matcher is of no use then.
    """

    def __init__(
        self,
        library: LLMatcher,
        compile_anew: Callable[[], LLMatcher],
        vocabulary: Vocabulary,
        vocab_size: int,
        end_ids: Collection[int],
    ) -> None:
        self._library, self._compile_anew = library, compile_anew
        self._vocab_size, self._num_known = vocab_size, len(vocabulary.first_bytes)
        self._first_bytes = vocabulary.first_bytes
        self._end_ids = frozenset(end_ids)
        # Never consumed: what rollback does behind an end of the library's own is not what it says.
        self._never = frozenset(vocabulary.tokenizer.eos_tokens)
        self._ends, self._nevers = (
            np.array(sorted(token for token in ids if 0 <= token < vocab_size), np.intp)
            for ids in (self._end_ids, self._never)
        )
        self._output: list[int] = []
        self._consumed: list[int] = []  # exactly what the library has consumed

    def follow(self, output: Sequence[int]) -> None:
        """Move to the state behind exactly these tokens; only those that are new are consumed."""
        output = list(output)
        common = _num_common(self._output, output)
        was_open = len(self._consumed) >= common
        with panics_refused():
            self._retreat(min(common, len(self._consumed)))
        self._output = output
        if was_open:
            self._retried(lambda: self._advance(output[common:]))

    def legal(self, path: Sequence[int]) -> BoolArray:
        """Return which tokens may come behind output + path, (vocab_size,) bool; the state stays as it was.

        Invariant: legal[t] = a fresh matcher consumes output + path + [t]; or t is an end id, and output + path
        satisfies the grammar. All False where no token of the vocabulary goes on, all True behind a path that
        breaks the grammar or holds an end id: such a node is never reached.
        """
        if self._is_closed:
            return np.ones(self._vocab_size, np.bool_)
        return self._retried(lambda: self._legal(path))

    def kept(self, tree: TokenTree) -> npt.NDArray[np.int32]:
        """Return the nodes (1…m, ascending) whose whole path is legal, none behind an end id; the state stays."""
        if self._is_closed:
            return np.arange(1, tree.num_nodes + 1, dtype=np.int32)
        nodes = self._retried(lambda: sorted(self._walk(tree)))
        return np.array(nodes, np.int32)

    @property
    def _is_closed(self) -> bool:
        return len(self._consumed) < len(self._output)

    def _legal(self, path: Sequence[int]) -> BoolArray:
        start = len(self._consumed)
        whole = self._advance(path) == len(path)
        legal = self._mask() if whole else np.ones(self._vocab_size, np.bool_)
        self._retreat(start)
        return legal

    def _walk(self, tree: TokenTree) -> Iterator[int]:
        """Yield the legal nodes, depth first, each consumed once."""
        start = len(self._consumed)
        pending = [(start, token, node) for token, node in tree.children[0].items()]
        while pending:
            length, token, node = pending.pop()
            self._retreat(length)
            if token in self._end_ids:
                if self._may_end(token):
                    yield node
            elif self._advance([token]):
                yield node
                pending += [(length + 1, child, below) for child, below in tree.children[node].items()]
        self._retreat(start)

    def _may_end(self, token: int) -> bool:
        """Return True when this end id is legal here: the grammar is satisfied, or takes it as content."""
        return self._library.is_accepting() or (self._is_known(token) and self._library.validate_tokens([token]) == 1)

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self._num_known and token not in self._never

    def _advance(self, tokens: Sequence[int]) -> int:
        """Consume tokens up to the first that is illegal or an end; return how many."""
        content = list(takewhile(lambda token: self._is_known(token) and token not in self._end_ids, tokens))
        number = self._library.try_consume_tokens(content)
        if number < len(content):
            self._bits()  # at a limit the library refuses tokens without saying why; a mask says it
        self._consumed += content[:number]
        return number

    def _mask(self) -> BoolArray:
        satisfied = self._library.is_accepting()
        known = np.unpackbits(np.frombuffer(self._bits(), np.uint8), bitorder="little")[: self._num_known]
        legal = np.zeros(self._vocab_size, np.bool_)
        legal[: len(known)] = known[: self._vocab_size]
        legal[self._nevers] = False
        if known.sum() == 1:
            self._widen(legal, int(known.argmax()))
        legal[self._ends] |= satisfied
        return legal

    def _widen(self, legal: BoolArray, token: int) -> None:
        """Where the next bytes are certain the library shows the tokenizer's own token alone: add its equals."""
        first = self._first_bytes[token]
        for other in np.flatnonzero(self._first_bytes[: self._vocab_size] == first).tolist() if first >= 0 else ():
            legal[other] = self._is_known(other) and self._library.validate_tokens([other]) == 1

    def _bits(self) -> bytes:
        """Return the library's mask, one bit a token; empty at a dead end; raises RequestError at a limit."""
        bits = self._library.compute_bitmask()
        if not self._library.is_error():
            return bits
        if self._library.get_error().startswith("NoExtension"):
            return b""
        # The lexer's states are shared with other copies of the grammar, whose doing it may be; the parser's are not.
        error = self._library.get_error()
        kind = RequestError if error.startswith("Parser Error") else Exhausted
        raise kind(wrap_error("grows too complex", error, len(self._consumed)))

    def _retreat(self, length: int) -> None:
        """Take back all but the first `length` consumed tokens."""
        surplus = len(self._consumed) - length
        del self._consumed[length:]
        if self._library.is_error() or not self._library.rollback(surplus):
            self._rebuild()

    def _rebuild(self) -> None:
        """Start over from a grammar compiled anew: an error never leaves a matcher, nor states the copies share."""
        self._library = self._compile_anew()
        if self._library.try_consume_tokens(self._consumed) < len(self._consumed):
            raise Exhausted(wrap_error("grows too complex", self._library.get_error(), len(self._consumed)))

    def _retried(self, work: Callable[[], Result]) -> Result:
        """Return what `work` does; at a limit, that the copies of a grammar may have reached together, once more."""
        start = len(self._consumed)
        try:
            with panics_refused():
                return work()
        except Exhausted:
            del self._consumed[start:]
        with panics_refused():
            self._rebuild()
            return work()


def _num_common(before: list[int], now: list[int]) -> int:
    """Return how many leading tokens are the same; appended tokens cost one comparison of lists."""
    if now[: len(before)] == before:
        return len(before)
    same = (a == b for a, b in zip(before, now, strict=False))
    return sum(takewhile(bool, same))


@contextmanager
def panics_refused() -> Iterator[None]:
    """Raise Exhausted for a panic of the library, which comes as pyo3's PanicException: no Exception, and unnamed."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Exhausted(wrap_error("broke the library", str(error))) from None


def wrap_error(what: str, error: str, num_tokens: int = 0) -> str:
    """Word the library's error: the line that says why, cut, since it may quote the client's whole text."""
    lines = (error.rpartition(" (in regex): ")[2] or "no text").splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    place = f" after {num_tokens} tokens" if num_tokens else ""
    return f"the guide {what}{place}: {reason[:200]} (allowed: what llguidance takes within its limits; {GUIDE})"
