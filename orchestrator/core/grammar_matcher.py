"""The position of one output in its grammar: which tokens may follow the output, and each path of a token tree."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from orchestrator.core.arrays import BoolArray, IdArray
from orchestrator.core.errors import RequestError
from orchestrator.core.proposal import Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import StepOptions

Result = TypeVar("Result")

GUIDE = "input guided_decoding_guide"
# The processor time that following a guide may take, and the extra time for each output token: several times what a
# large schema takes on a slow machine. Only its own request waits for a guide, but all requests share the processors.
FIRST_MASKS_S, TOKEN_MASKS_S = 0.25, 0.02


class Exhausted(RequestError):
    """The library reached a limit, perhaps because of other requests; its last answer is not valid."""


class GrammarTokenizer(NamedTuple):
    """The library's tokenizer. first_bytes: (n,) int16, the first byte of each of its tokens; −1: it has no text."""

    library: LLTokenizer
    first_bytes: npt.NDArray[np.int16]


class CompiledGrammar(NamedTuple):
    """A compiled grammar, which is not used itself but copied.

    lock: to be held while a copy is used. All copies share the lexer's states; without the lock, the library would wait
    for these states while it holds the GIL, and so block every thread of the process.
    compile_s: the processor time that compiling took.
    """

    library: LLMatcher
    lock: AbstractContextManager[object]
    compile_s: float = 0.0


class Matcher:
    """The position of one request's output in its grammar; one thread at a time.

    compiled: the grammar. compile_again: compiles it anew. vocab_size: width of the masks.
    end_ids: the ids that end the output.

    Invariant: an answer is a function of grammar, output and path only, not of earlier calls.
    An output that has broken the grammar or has ended is no longer restricted: every token is legal after it.
    Raises: RequestError if the grammar grows too complex during the output, or takes too much time; the matcher must
    not be used again after that.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        compile_again: Callable[[], CompiledGrammar],
        tokenizer: GrammarTokenizer,
        vocab_size: int,
        end_ids: Collection[int],
    ) -> None:
        with panics_as_errors():
            self._library = compiled.library.deep_copy()
        self._compile_again, self._lock, self._was_rebuilt = compile_again, compiled.lock, False
        self._vocab_size, self._num_known = vocab_size, len(tokenizer.first_bytes)
        self._first_bytes = tokenizer.first_bytes
        self._end_ids = frozenset(end_ids)
        # The library's own end ids are never consumed, since it cannot roll back over them.
        self._never_consumed = frozenset(tokenizer.library.eos_tokens)
        self._output: list[int] = []
        self._consumed: list[int] = []  # exactly what the library has consumed
        self._spent_s = self._began_s = 0.0

    def follow(self, output: Sequence[int]) -> None:
        """Move to the state after exactly these tokens; only new tokens are consumed."""
        output = list(output)
        common = _num_common(self._output, output)
        was_open = len(self._consumed) >= common
        self._began_s = time.thread_time()
        with self._lock, panics_as_errors():
            self._retreat(min(common, len(self._consumed)))
        self._output = output
        if was_open:
            self._with_retry(lambda: self._advance(output[common:]))

    def legal(self, path: Sequence[int]) -> BoolArray:
        """Return which tokens may follow output + path; the state does not change.

        Returns (vocab_size,) bool.
        Invariant: legal[t] is True if a fresh matcher consumes output + path + [t], or if t is an end id and
        output + path satisfies the grammar. All False if no token of the vocabulary continues the grammar. All True
        after a path that breaks the grammar or contains an end id: such a node is never accepted.
        """
        if self._is_closed:
            return np.ones(self._vocab_size, np.bool_)
        return self._with_retry(lambda: self._legal(path))

    def legal_rows(self, tree: TokenTree) -> BoolArray:
        """Return which tokens may follow the root and every node, (m + 1, vocab_size) bool, as `legal` does."""
        return np.stack([self.legal(path) for path in tree.paths])

    def legal_nodes(self, tree: TokenTree) -> IdArray:
        """Return the nodes whose whole path is legal and has no end id before its last node; the state does not change.

        Returns (k,) int32, nodes of 1…m, ascending.
        """
        if self._is_closed:
            return np.arange(1, tree.num_nodes + 1, dtype=np.int32)
        nodes = self._with_retry(lambda: sorted(self._visit(tree)))
        return np.array(nodes, np.int32)

    @property
    def _is_closed(self) -> bool:
        """True if the output has broken the grammar or has ended."""
        return len(self._consumed) < len(self._output)

    def _legal(self, path: Sequence[int]) -> BoolArray:
        start = len(self._consumed)
        is_unbroken = self._advance(path) == len(path)
        legal = self._mask() if is_unbroken else np.ones(self._vocab_size, np.bool_)
        self._retreat(start)
        return legal

    def _visit(self, tree: TokenTree) -> Iterator[int]:
        """Yield the legal nodes, depth first; each is consumed once."""
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
        """Return True if this end id is legal here: the grammar is satisfied, or accepts the id as content."""
        return self._library.is_accepting() or (self._is_known(token) and self._library.validate_tokens([token]) == 1)

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self._num_known and token not in self._never_consumed

    def _advance(self, tokens: Sequence[int]) -> int:
        """Consume tokens up to the first that is illegal or an end id; return how many were consumed."""
        content = list(takewhile(lambda token: self._is_known(token) and token not in self._end_ids, tokens))
        number = self._consume(content)
        if number < len(content):
            self._bits()  # at a limit the library refuses tokens without an error; computing a mask raises it
        self._consumed += content[:number]
        return number

    def _consume(self, tokens: Sequence[int]) -> int:
        """Have the library consume tokens up to the first that it refuses; return how many were consumed."""
        for number, token in enumerate(tokens):
            # One at a time: unlike a call for masks, this call holds the GIL, for 0.2 s in the worst case measured.
            if not self._library.try_consume_tokens([token]):
                return number
            self._check_time()
        return len(tokens)

    def _mask(self) -> BoolArray:
        is_satisfied = self._library.is_accepting()
        known = np.unpackbits(np.frombuffer(self._bits(), np.uint8), bitorder="little")[: self._num_known]
        legal = np.zeros(self._vocab_size, np.bool_)
        legal[: len(known)] = known[: self._vocab_size]
        legal[self._within_mask(self._never_consumed)] = False
        if known.sum() == 1:
            self._add_equivalents(legal, int(known.argmax()))
        legal[self._within_mask(self._end_ids)] |= is_satisfied
        return legal

    def _within_mask(self, ids: Collection[int]) -> list[int]:
        return [token for token in ids if 0 <= token < self._vocab_size]

    def _add_equivalents(self, legal: BoolArray, token: int) -> None:
        """Add the legal tokens with the first byte of `token`: the library names only one if one text can follow."""
        first = self._first_bytes[token]
        for other in np.flatnonzero(self._first_bytes[: self._vocab_size] == first).tolist() if first >= 0 else ():
            legal[other] = self._is_known(other) and self._library.validate_tokens([other]) == 1
            self._check_time()

    def _bits(self) -> bytes:
        """Return the library's mask, one bit per token; empty at a dead end. Raise RequestError at a limit."""
        bits = self._library.compute_bitmask()
        if not self._library.is_error():
            return bits
        error = self._library.get_error()
        if error.startswith("NoExtension"):
            return b""
        # All copies of the grammar share the lexer's states, so other requests may have reached its limit. The parser's
        # states are this matcher's own.
        kind = RequestError if error.startswith("Parser Error") else Exhausted
        raise kind(wrap_error("grows too complex", error, len(self._consumed)))

    def _retreat(self, length: int) -> None:
        """Undo all but the first `length` consumed tokens."""
        surplus = len(self._consumed) - length
        del self._consumed[length:]
        if self._library.is_error() or not self._library.rollback(surplus):
            self._rebuild()

    def _rebuild(self) -> None:
        """Compile the grammar anew and consume everything again: an error stays in a matcher and its shared states."""
        compiled = self._compile_again()
        self._library = compiled.library.deep_copy()
        # The first time costs nothing, since other requests with this grammar may have used up its states.
        self._spent_s += compiled.compile_s if self._was_rebuilt else 0.0
        self._was_rebuilt = True
        if self._consume(self._consumed) < len(self._consumed):
            raise Exhausted(wrap_error("grows too complex", self._library.get_error(), len(self._consumed)))

    def _with_retry(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`; at a limit compile the grammar anew and try once more."""
        start = len(self._consumed)
        self._began_s = time.thread_time()  # this thread's processor time: a busy machine does not make a guide slow
        try:
            with self._lock, panics_as_errors():
                result = work()
        except Exhausted:
            del self._consumed[start:]
            with self._lock, panics_as_errors():
                self._rebuild()
                result = work()
        self._check_time()
        self._spent_s += time.thread_time() - self._began_s
        return result

    def _check_time(self) -> None:
        """Raise RequestError if the guide has taken more time than it may."""
        spent_s = self._spent_s + time.thread_time() - self._began_s
        limit_s = FIRST_MASKS_S + TOKEN_MASKS_S * len(self._output)
        if spent_s > limit_s:
            raise RequestError(
                f"the guide takes too long to follow: {spent_s:.2f} s of processor time for "
                f"{len(self._output)} tokens, at most {limit_s:.2f} allowed ({GUIDE})"
            )


def _num_common(before: list[int], now: list[int]) -> int:
    """Return the number of equal leading tokens; if tokens were only appended, this is one comparison of lists."""
    if now[: len(before)] == before:
        return len(before)
    return sum(takewhile(bool, (a == b for a, b in zip(before, now, strict=False))))


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise Exhausted if the library panics (pyo3's PanicException, which cannot be imported)."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Exhausted(wrap_error("broke the library", str(error))) from None


def wrap_error(what: str, error: str, num_tokens: int = 0) -> str:
    """Return our message for an error of the library, whose text is cut: it may quote everything the client sent."""
    lines = (error.rpartition(" (in regex): ")[2] or "no text").splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    place = f" after {num_tokens} tokens" if num_tokens else ""
    return f"the guide {what}{place}: {reason[:200]} (allowed: what llguidance accepts within its limits; {GUIDE})"


def legal_drafts(matcher: Matcher, proposal: Proposal, sampling: Sampling, options: StepOptions) -> Proposal:
    """Return the drafts that the grammar allows after the output that the matcher has followed.

    options: what the proposer needs from the step that verifies them.
    Invariant: the text stays the same, since the target would not accept the others. Two kinds of proposal are
    returned unchanged: drafts sampled from q under a rule that reads q, where leaving out a node because of its token
    would bias the text; and those of a proposer that learns from the target's tokens at all its nodes.
    """
    if options.target_tokens or not proposal.tree.num_nodes or (proposal.q and sampling.rule.uses_q):
        return proposal
    return proposal.only(matcher.legal_nodes(proposal.tree))
