"""Grammars that take too long, or break the library: one request is refused, and the others are served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from orchestrator.core import grammar as module
from orchestrator.core.errors import RequestError, Unavailable
from orchestrator.core.grammar import NUM_LATE, Grammars
from orchestrator.core.grammar_matcher import CompiledGrammar, Matcher
from orchestrator.core.sampling_params import Grammar
from tests.support.hanging import Hang, until

FILE = Path(__file__).resolve().parents[4] / "models/target/tokenizer.json"
VOCAB_SIZE, EOS = 4096, 0
SHORT_S = 0.5  # enough for a thread to begin, on a machine that is busy
WORDS, OTHER = Grammar("regex", "(foo|bar)+"), Grammar("regex", "[0-9]+")


class PanicException(BaseException):
    """As a Rust panic comes: beside Exception, of a class that cannot be imported."""


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(FILE, VOCAB_SIZE, [EOS])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Let compilations of a text that begins with "slow" hang until they are let go."""
    hang, compiled = Hang(), module._compile_matcher

    def compiling(tokenizer: LLTokenizer, grammar: Grammar) -> tuple[LLMatcher, float]:
        if grammar.text.startswith("slow"):
            hang()
        return compiled(tokenizer, grammar)

    monkeypatch.setattr(module, "_compile_matcher", compiling)
    monkeypatch.setattr(module, "LIMIT_S", SHORT_S)
    return hang


def test_a_guide_that_takes_too_long_is_refused_with_the_limit_and_only_so_many_go_on(slow: Hang) -> None:
    grammars = Grammars(FILE, VOCAB_SIZE, [EOS])
    grammars.check(WORDS)
    for number in range(NUM_LATE):
        with pytest.raises(RequestError, match=r"longer than 0\.5 s to compile \(input guided_decoding_guide\)"):
            grammars.check(Grammar("regex", f"slow{number}"))
    for kind in (OTHER, Grammar("regex", "slow again")):
        with pytest.raises(Unavailable, match="try again later"):
            grammars.check(kind)
    grammars.matcher(WORDS, [EOS])  # what is compiled already is not held up
    slow.let_go.set()
    until(lambda: not grammars._compiling.num_abandoned)
    grammars.check(OTHER)
    assert Grammar("regex", "slow0") not in grammars._compiled, "what was refused must not be legal the next time"


def test_a_panic_in_compiling_refuses_the_request_alone(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(text: str) -> str:
        raise PanicException("index out of bounds")

    with monkeypatch.context() as patch:
        patch.setattr(LLMatcher, "grammar_from_regex", staticmethod(panic))
        with pytest.raises(RequestError, match="broke the library: index out of bounds"):
            grammars.check(WORDS)
    grammars.check(WORDS)


class Panicking:
    """A library's matcher that panics at one of its methods, `count` times."""

    def __init__(self, library: LLMatcher, method: str, count: int = 1) -> None:
        self._library, self._method, self.count = library, method, count

    def deep_copy(self) -> Panicking:
        return Panicking(self._library.deep_copy(), self._method, self.count)

    def __getattr__(self, name: str) -> Any:
        if name != self._method or not self.count:
            return getattr(self._library, name)
        self.count -= 1

        def panic(*given: Any) -> None:
            raise PanicException("poisoned")

        return panic


ANSWERS: dict[str, Callable[[Matcher], Any]] = {
    "compute_bitmask": lambda matcher: matcher.legal([]).tolist(),
    "try_consume_tokens": lambda matcher: matcher.legal(np.flatnonzero(matcher.legal([]))[:1].tolist()).tolist(),
    "is_accepting": lambda matcher: matcher.legal([]).tolist(),
}


@pytest.mark.parametrize("method", ANSWERS)
def test_a_panic_midway_is_mended_once_by_compiling_anew(grammars: Grammars, method: str) -> None:
    sound, broken = grammars.matcher(WORDS, [EOS]), grammars.matcher(WORDS, [EOS])
    first = np.flatnonzero(sound.legal([]))[:1].tolist()
    for matcher in (sound, broken):
        matcher.follow(first)
    broken._library = panicking = Panicking(broken._library, method)
    assert ANSWERS[method](broken) == ANSWERS[method](sound) and not panicking.count


class Slow:
    """A library's matcher that takes a tenth of a second of the processor for each call of one method."""

    def __init__(self, library: LLMatcher, method: str = "compute_bitmask") -> None:
        self._library, self._method, self.num_calls = library, method, 0

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._library, name)
        if name != self._method:
            return work

        def slow(*given: Any) -> Any:
            self.num_calls += 1
            end_s = time.thread_time() + 0.1
            while time.thread_time() < end_s:
                pass
            return work(*given)

        return slow


def test_a_guide_that_takes_too_long_to_follow_ends_its_request(grammars: Grammars) -> None:
    matcher = grammars.matcher(WORDS, [EOS])
    matcher._library = slow = Slow(matcher._library)
    with pytest.raises(RequestError, match=r"too long to follow: 0\.3\d s .* for 0 tokens, at most 0\.25 allowed"):
        for _ in range(10):
            matcher.legal([])
    assert slow.num_calls == 3
    assert grammars.matcher(WORDS, [EOS]).legal([]).any(), "another request with the same guide has a time of its own"


@pytest.mark.parametrize("method", ["try_consume_tokens", "validate_tokens"])
def test_a_guide_that_takes_too_long_is_stopped_within_a_piece_of_work(grammars: Grammars, method: str) -> None:
    """These calls hold the GIL: a path of a tree, and a mask where one text alone can follow, are many of them."""
    matcher = grammars.matcher(Grammar("regex", "(and ){100}"), [EOS])
    path = []
    for _ in range(20 if method == "try_consume_tokens" else 0):
        path.append(int(np.flatnonzero(matcher.legal(path))[0]))
    assert np.count_nonzero(matcher.legal([])) > 1, "several tokens begin the one text"
    matcher._library = slow = Slow(matcher._library, method)
    with pytest.raises(RequestError, match=r"too long to follow: 0\.3\d s"):
        matcher.legal(path)
    assert slow.num_calls == 3


def test_a_guide_is_compiled_anew_at_its_own_expense_after_the_first_time(grammars: Grammars) -> None:
    matcher = grammars.matcher(WORDS, [EOS])
    compiled = [CompiledGrammar(grammars._compile(WORDS).library, threading.Lock(), 0.2) for _ in range(3)]
    matcher._compile_again = compiled.pop
    for _ in range(2):
        matcher._library = Panicking(matcher._library, "compute_bitmask")
        assert matcher.legal([]).any()
    matcher._library = Panicking(matcher._library, "compute_bitmask")
    with pytest.raises(RequestError, match=r"too long to follow: 0\.4\d s"):
        matcher.legal([])


def test_a_schema_that_is_nested_too_deeply_is_refused(grammars: Grammars) -> None:
    schema = '{"items": ' * 120 + "{}" + "}" * 120
    with pytest.raises(RequestError, match="schema is nested more than 100 levels"):
        grammars.check(Grammar("json_schema", schema))
