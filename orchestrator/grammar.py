"""Structured output: which tokens may come behind an output that must match a JSON schema or an expression.

The library llguidance does the parsing; here it is bounded, made undoable for token trees, and its errors are worded.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from orchestrator.errors import ConfigError, RequestError, Unavailable, unknown_name
from orchestrator.tree import TokenTree
from orchestrator.types import Grammar
from orchestrator.workers import Busy, Late, Limited

BoolArray = npt.NDArray[np.bool_]
Result = TypeVar("Result")

KINDS = ("json", "json_schema", "regex")
MAX_TEXT_BYTES = 64 * 1024
MAX_COMPILED = 64
MAX_JOINED = 8
# A compilation cannot be stopped. One that takes longer is left behind; NUM_LATE of them, and no other one begins.
LIMIT_S, NUM_COMPILING, NUM_LATE = 2.0, 2, 2
# Between two lexemes of JSON. Any run of blanks, the library's default, is a place where a weak model stays for ever.
WHITESPACE = " "
GUIDE = "input guided_decoding_guide"
# What `json` means elsewhere too (xgrammar in TensorRT-LLM): a bare number would be JSON, but nobody's wish.
ANY_JSON = '{"type": ["object", "array"]}'
# Tighter than the library's own, since others wait: copies share the states, 1 to 2 kB each, and MAX_COMPILED are held.
LIMITS = LLParserLimits(
    initial_lexer_fuel=50_000, step_lexer_fuel=20_000, max_lexer_states=10_000, verbose_errors=False
)


class _Exhausted(RequestError):
    """The library hit a limit that others may have brought it to; what it answered last is worth nothing."""


class Grammars:
    """All grammars of one process; any thread may call.

    tokenizer: the path of a tokenizer.json, or its text. vocab_size: width of the masks; may be more than the
    tokenizer knows (such ids are never legal) or fewer. eos_ids: the ids that end a text.
    The library reads the tokenizer on first use: 50 ms for models/target (4096 ids), and more for more ids.
    JSON comes with at most one space between two lexemes, none before the first or behind the last; in strings there is
    no unicode escape of what can stand as itself.
    """

    def __init__(self, tokenizer: str | Path, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._source, self._vocab_size, self._eos_ids = str(tokenizer), vocab_size, frozenset(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._compiling: Limited[LLMatcher] = Limited("grammar", NUM_COMPILING, NUM_LATE, LIMIT_S)

    def check(self, grammar: Grammar) -> None:
        """Raise RequestError when the grammar is broken, too complex, or nothing can match it.

        Unavailable, when too many others are being compiled.
        """
        self._pristine(grammar)

    def is_ready(self, grammar: Grammar) -> bool:
        """Return True when a matcher of the grammar can be had at once; compiling an odd one takes 300 ms."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return grammar in self._compiled

    def matcher(self, grammar: Grammar, end_ids: Collection[int]) -> Matcher:
        """Return a matcher at the start of an output that the ids `end_ids` end; raises as `check` does."""
        with _panics_refused():
            library = self._pristine(grammar).deep_copy()
        return Matcher(library, partial(self._compile, grammar), self._read(), self._vocab_size, end_ids)

    def _pristine(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        # Not under the lock, since it may take long. At worst two threads do the same work.
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Compile anew, remember the result, and return a copy."""
        try:
            pristine = self._compiling.call(partial(_compiled, self._read().tokenizer, grammar))
        except Late:
            raise RequestError(f"the guide takes longer than {LIMIT_S:g} s to compile ({GUIDE})") from None
        except Busy:
            raise Unavailable(f"other guides take too long to compile; try again later ({GUIDE})") from None
        with self._lock:
            self._compiled[grammar] = pristine
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return pristine.deep_copy()

    def _read(self) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._source, self._eos_ids)
            return self._vocabulary


class _Vocabulary(NamedTuple):
    """The library's tokenizer, and the first byte of each of its tokens, (n,) int16; -1 where it holds no text."""

    tokenizer: LLTokenizer
    first_bytes: npt.NDArray[np.int16]


class Matcher:
    """Where the output of one request stands in its grammar; one thread at a time.

    Law: what is answered is a function of grammar, output and path alone, not of what was asked before.
    An output that broke the grammar, or has ended, binds nothing any more: every token is legal behind it.
    Methods raise RequestError when the grammar grows too complex mid-way; the matcher is of no use then.
    """

    def __init__(
        self,
        library: LLMatcher,
        compile_anew: Callable[[], LLMatcher],
        vocabulary: _Vocabulary,
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
        with _panics_refused():
            self._retreat(min(common, len(self._consumed)))
        self._output = output
        if was_open:
            self._retried(lambda: self._advance(output[common:]))

    def legal(self, path: Sequence[int]) -> BoolArray:
        """Return which tokens may come behind output + path, (vocab_size,) bool; the state stays as it was.

        Law: legal[t] = a fresh matcher consumes output + path + [t]; or t is an end id, and output + path
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
        kind = RequestError if error.startswith("Parser Error") else _Exhausted
        raise kind(_worded("grows too complex", error, len(self._consumed)))

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
            raise _Exhausted(_worded("grows too complex", self._library.get_error(), len(self._consumed)))

    def _retried(self, work: Callable[[], Result]) -> Result:
        """Return what `work` does; at a limit, that the copies of a grammar may have reached together, once more."""
        start = len(self._consumed)
        try:
            with _panics_refused():
                return work()
        except _Exhausted:
            del self._consumed[start:]
        with _panics_refused():
            self._rebuild()
            return work()


@contextmanager
def _panics_refused() -> Iterator[None]:
    """Raise _Exhausted for a panic of the library, which comes as pyo3's PanicException: no Exception, and unnamed."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _Exhausted(_worded("broke the library", str(error))) from None


def _num_common(before: list[int], now: list[int]) -> int:
    """Return how many leading tokens are the same; appended tokens cost one comparison of lists."""
    if now[: len(before)] == before:
        return len(before)
    same = (a == b for a, b in zip(before, now, strict=False))
    return sum(takewhile(bool, same))


def _vocabulary(source: str, eos_ids: Collection[int]) -> _Vocabulary:
    """Read the tokenizer; its own end is a special token, which no text can hold."""
    try:
        text = source if source.lstrip().startswith("{") else Path(source).read_text(encoding="utf-8")
        special = [token["id"] for token in json.loads(text).get("added_tokens", []) if token.get("special")]
        ends = [token for token in special if token in eos_ids] or special
        tokenizer = LLTokenizer(text, eos_token=ends or None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the target's tokenizer.json cannot serve grammars: {error}") from None
    pieces = (
        b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)
    )
    return _Vocabulary(tokenizer, np.array([piece[0] if piece else -1 for piece in pieces], np.int16))


@_panics_refused()
def _compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    if grammar.kind not in KINDS:
        raise RequestError(unknown_name("guide type", grammar.kind, KINDS, f"{GUIDE}_type"))
    try:
        num_bytes = len(grammar.text.encode())
        if num_bytes > MAX_TEXT_BYTES:
            raise RequestError(f"the guide has {num_bytes} bytes, at most {MAX_TEXT_BYTES} are allowed ({GUIDE})")
        library = LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=LIMITS)
    except (ValueError, RecursionError) as error:
        raise RequestError(_worded("cannot be read", str(error))) from None
    library.compute_bitmask()  # shows what nothing can match, and warms what the copies share
    if library.is_error():
        raise RequestError(_worded(f"is no {grammar.kind} that can be matched", library.get_error()))
    return library


def _definition(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    schema = ANY_JSON if grammar.kind == "json" else grammar.text
    _check_joined(json.loads(schema))
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})


def _check_joined(schema: Any) -> None:
    """Raise RequestError for a schema that joins many others: the library builds the product of their automata."""
    if isinstance(schema, dict) and len(schema.get("allOf") or ()) > MAX_JOINED:
        raise RequestError(f"an allOf has {len(schema['allOf'])} entries, at most {MAX_JOINED} are allowed ({GUIDE})")
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _check_joined(part)


def _worded(what: str, error: str, num_tokens: int = 0) -> str:
    """Word the library's error: the line that says why, cut, since it may quote the client's whole text."""
    lines = (error.rpartition(" (in regex): ")[2] or "no text").splitlines()
    reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    place = f" after {num_tokens} tokens" if num_tokens else ""
    return f"the guide {what}{place}: {reason[:200]} (allowed: what llguidance takes within its limits; {GUIDE})"
