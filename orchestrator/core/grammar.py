"""Structured output: compiles JSON schemas and regular expressions into matchers of the outputs that they allow.

The library llguidance does the parsing; this module limits its work, and caches and shares the compiled grammars. A
request's own matcher, which can roll back and so serves token trees, is in
orchestrator/core/grammar_matcher.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from orchestrator.core.declarations import check_depth
from orchestrator.core.errors import ConfigError, RequestError, Unavailable, unknown_name
from orchestrator.core.grammar_matcher import (
    GUIDE,
    CompiledGrammar,
    GrammarTokenizer,
    Matcher,
    panics_as_errors,
    wrap_error,
)
from orchestrator.core.sampling_params import Grammar
from orchestrator.core.worker_pool import Busy, Late, WorkerPool

KINDS = ("json", "json_schema", "regex")
MAX_GUIDE_BYTES = 64 * 1024
MAX_COMPILED = 64
MAX_ALL_OF = 8
# A compilation cannot be stopped. After LIMIT_S it is abandoned; while NUM_LATE of these still run, no other starts.
LIMIT_S, NUM_COMPILING, NUM_LATE = 2.0, 2, 2
# Allowed between two lexemes of JSON. The library's default, any number of blanks, lets a weak model emit them forever.
WHITESPACE = " "
# As in xgrammar (TensorRT-LLM). A bare number would be valid JSON too, but it is not what a user of `json` wants.
ANY_JSON = '{"type": ["object", "array"]}'
# Tighter than the library's defaults, since other requests wait. The copies of a grammar share its lexer states, which
# take 1 to 2 kB each, and MAX_COMPILED grammars are kept.
LIMITS = LLParserLimits(
    initial_lexer_fuel=50_000, step_lexer_fuel=20_000, max_lexer_states=10_000, verbose_errors=False
)


class Grammars:
    """All grammars of one process; any thread may call.

    tokenizer: the path of a tokenizer.json, or its text. vocab_size: width of the masks. It may be larger than the
    tokenizer's vocabulary (the additional ids are never legal) or smaller. eos_ids: the ids that end a text.

    The library reads the tokenizer on first use: 50 ms for the 4096 ids of models/target, more for a larger vocabulary.
    JSON output has at most one space between two lexemes, none before the first or after the last, and no unicode
    escapes in strings for characters that can be written directly.
    """

    def __init__(self, tokenizer: str | Path, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._source, self._vocab_size, self._eos_ids = str(tokenizer), vocab_size, frozenset(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._compiling: WorkerPool[tuple[LLMatcher, float]] = WorkerPool("grammar", NUM_COMPILING, NUM_LATE)

    def check(self, grammar: Grammar) -> None:
        """Compile the grammar if it is new.

        Raises: RequestError if it is invalid or too complex, or if no output can match it. Unavailable if too many
        other grammars are being compiled.
        """
        self._pristine(grammar)

    def matcher(self, grammar: Grammar, end_ids: Collection[int]) -> Matcher:
        """Return a matcher at the start of an output that any of `end_ids` ends; raise as `check` does."""
        pristine = self._pristine(grammar)
        return Matcher(pristine, partial(self._compile, grammar), self._read_tokenizer(), self._vocab_size, end_ids)

    def _cached(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _pristine(self, grammar: Grammar) -> CompiledGrammar:
        # Not under the lock, since compiling may take long. At worst, two threads do the same work.
        return self._cached(grammar) or self._compile(grammar)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile the grammar, keep the result, and return it."""
        try:
            library, compile_s = self._compiling.run(
                partial(_compile_matcher, self._read_tokenizer().library, grammar), LIMIT_S
            )
        except Late:
            raise RequestError(f"the guide takes longer than {LIMIT_S:g} s to compile ({GUIDE})") from None
        except Busy:
            raise Unavailable(f"other guides take too long to compile; try again later ({GUIDE})") from None
        with self._lock:
            lock = self._compiled[grammar].lock if grammar in self._compiled else threading.Lock()
            pristine = self._compiled[grammar] = CompiledGrammar(library, lock, compile_s)
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return pristine

    def _read_tokenizer(self) -> GrammarTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _read_tokenizer(self._source, self._eos_ids)
            return self._tokenizer


def _read_tokenizer(source: str, eos_ids: Collection[int]) -> GrammarTokenizer:
    """Read the tokenizer; if no EOS id is a special token, all special tokens end a text, as no text contains them."""
    try:
        text = source if source.lstrip().startswith("{") else Path(source).read_text(encoding="utf-8")
        special = [token["id"] for token in json.loads(text).get("added_tokens", []) if token.get("special")]
        ends = [token for token in special if token in eos_ids] or special
        library = LLTokenizer(text, eos_token=ends or None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the target's tokenizer.json cannot serve grammars: {error}") from None
    pieces = (b"" if library.is_special_token(i) else library.decode_bytes([i]) for i in range(library.vocab_size))
    return GrammarTokenizer(library, np.array([piece[0] if piece else -1 for piece in pieces], np.int16))


@panics_as_errors()
def _compile_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> tuple[LLMatcher, float]:
    """Return a matcher at the start of the grammar, and the processor time that it took."""
    began_s = time.thread_time()
    if grammar.kind not in KINDS:
        raise RequestError(unknown_name("guide type", grammar.kind, KINDS, f"{GUIDE}_type"))
    try:
        num_bytes = len(grammar.text.encode())
        if num_bytes > MAX_GUIDE_BYTES:
            raise RequestError(f"the guide has {num_bytes} bytes, at most {MAX_GUIDE_BYTES} are allowed ({GUIDE})")
        library = LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=LIMITS)
    except (ValueError, RecursionError) as error:
        raise RequestError(wrap_error("cannot be read", str(error))) from None
    library.compute_bitmask()  # sets the error if nothing can match, and computes states that the copies share
    if library.is_error():
        raise RequestError(wrap_error(f"is not a {grammar.kind} that an output can match", library.get_error()))
    return library, time.thread_time() - began_s


def _definition(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    schema = ANY_JSON if grammar.kind == "json" else grammar.text
    value = json.loads(schema)
    check_depth(value, "the guide's schema", RequestError)
    _check_all_of(value)
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})


def _check_all_of(schema: Any) -> None:
    """Raise RequestError if an allOf has too many schemas: the library builds the product of their automata."""
    if isinstance(schema, dict):
        parts = schema.get("allOf")  # if it is not a list, the library refuses it
        if isinstance(parts, list) and len(parts) > MAX_ALL_OF:
            raise RequestError(f"an allOf has {len(parts)} entries, at most {MAX_ALL_OF} are allowed ({GUIDE})")
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _check_all_of(part)
