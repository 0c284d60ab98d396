"""Structured output: a JSON schema or an expression becomes a matcher of the outputs that it allows.

The library llguidance does the parsing; here it is bounded, and what it has compiled is kept and shared. What makes it
undoable for token trees, and words its errors: orchestrator/sampling/grammar_matcher.py.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from orchestrator.core.errors import ConfigError, RequestError, Unavailable, unknown_name
from orchestrator.core.sampling_params import Grammar
from orchestrator.core.worker_pool import Busy, Late, WorkerPool
from orchestrator.sampling.grammar_matcher import GUIDE, Matcher, Vocabulary, panics_refused, wrap_error

KINDS = ("json", "json_schema", "regex")
MAX_TEXT_BYTES = 64 * 1024
MAX_COMPILED = 64
MAX_JOINED = 8
# A compilation cannot be stopped. One that takes longer is left behind; NUM_LATE of them, and no other one begins.
LIMIT_S, NUM_COMPILING, NUM_LATE = 2.0, 2, 2
# Between two lexemes of JSON. Any run of blanks, the library's default, is a place where a weak model stays for ever.
WHITESPACE = " "
# What `json` means elsewhere too (xgrammar in TensorRT-LLM): a bare number would be JSON, but nobody's wish.
ANY_JSON = '{"type": ["object", "array"]}'
# Tighter than the library's own, since others wait: copies share the states, 1 to 2 kB each, and MAX_COMPILED are held.
LIMITS = LLParserLimits(
    initial_lexer_fuel=50_000, step_lexer_fuel=20_000, max_lexer_states=10_000, verbose_errors=False
)


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
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._compiling: WorkerPool[LLMatcher] = WorkerPool("grammar", NUM_COMPILING, NUM_LATE)

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
        with panics_refused():
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
            pristine = self._compiling.run(partial(_compiled, self._read().tokenizer, grammar), LIMIT_S)
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

    def _read(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._source, self._eos_ids)
            return self._vocabulary


def _vocabulary(source: str, eos_ids: Collection[int]) -> Vocabulary:
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
    return Vocabulary(tokenizer, np.array([piece[0] if piece else -1 for piece in pieces], np.int16))


@panics_refused()
def _compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    if grammar.kind not in KINDS:
        raise RequestError(unknown_name("guide type", grammar.kind, KINDS, f"{GUIDE}_type"))
    try:
        num_bytes = len(grammar.text.encode())
        if num_bytes > MAX_TEXT_BYTES:
            raise RequestError(f"the guide has {num_bytes} bytes, at most {MAX_TEXT_BYTES} are allowed ({GUIDE})")
        library = LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=LIMITS)
    except (ValueError, RecursionError) as error:
        raise RequestError(wrap_error("cannot be read", str(error))) from None
    library.compute_bitmask()  # shows what nothing can match, and warms what the copies share
    if library.is_error():
        raise RequestError(wrap_error(f"is no {grammar.kind} that can be matched", library.get_error()))
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
