"""Steps under a grammar: their masks are made apart, so that a slow or broken grammar is its own request's alone."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.reference import decoding as reference
from benchmarks.stock_model import StockModel
from orchestrator.core.arrays import BoolArray, IdArray
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import EngineError, RequestError, ServingError, Unavailable, UnknownSequence
from orchestrator.core.grammar import Grammars
from orchestrator.core.grammar_matcher import Matcher
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.run import RunOptions, TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import StepOptions
from orchestrator.drafting.registry import select_method
from orchestrator.server.loop import StepByStep, StepsOfRun
from orchestrator.server.text import StopRule
from runtime.engine.runs import Runs
from runtime.engine.target_thread import TargetThread
from tests.support import decode as support
from tests.support.engines import LIMIT_S, EngineTarget, make_paged, start_target
from tests.support.hanging import Hang
from tests.support.tiny_models import VOCAB_SIZE
from tests.unit.runtime.engine.test_runs import Caller, Proposers, Served, generate_text, sequence_of

PROMPT = [5, 9, 3, 5, 9, 3, 5, 9]
MAX_TOKENS = 24
#: Of the tiny tokenizer's letters; the model, which is random, would never write these by itself.
SOUND, SLOW, BROKEN = (Grammar("regex", text) for text in ("(ab|cd|xyz){3,40}", "(ab|xyz){3,40}", "(ab|pq){3,40}"))


def sampling_of(grammar: Grammar | None, **values: Any) -> Sampling:
    options = LogitsOptions(grammar=grammar, end_ids=(0,)) if grammar else LogitsOptions()
    return Sampling(logits_options=options, **values)


class Watched(Matcher):
    """Notes the threads that make masks; hangs or fails where its grammar says so."""

    def __init__(self, inner: Matcher, grammar: Grammar, grammars: WatchedGrammars) -> None:
        self.__dict__ = inner.__dict__
        self.grammar, self.watched = grammar, grammars

    def _note(self) -> None:
        self.watched.threads.add(threading.current_thread().name)
        if self.grammar == SLOW:
            self.watched.slow()
        if self.grammar == BROKEN and self.watched.error:
            raise self.watched.error

    def legal(self, path: Any) -> BoolArray:
        self._note()
        return super().legal(path)

    def legal_nodes(self, tree: TokenTree) -> IdArray:
        self._note()
        return super().legal_nodes(tree)


class WatchedGrammars(Grammars):
    """slow: what masks of the grammar SLOW wait for. error: what those of BROKEN raise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "tokenizer.json", VOCAB_SIZE, [0])
        self.threads: set[str] = set()
        self.slow: Any = lambda: None
        self.error: Exception | None = None

    def matcher(self, grammar: Grammar, end_ids: Any) -> Matcher:
        return Watched(super().matcher(grammar, end_ids), grammar, self)


class Guided(Served):
    """A served target whose engine has a tokenizer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine.close()
        self.grammars = WatchedGrammars(folder)
        self.engine: TargetThread = start_target(make_paged(folder), self.grammars)
        self.runs = Runs(self.engine, Proposers(self))

    def submit(self, request: StepRequest | TakeSteps) -> queue.SimpleQueue[Any]:
        """Submit a call as the host does, without waiting; its answer comes out of the queue."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if work := self.runs.preparation(request):
            work()
        self.runs.submit(request, time.monotonic() + LIMIT_S, answers.put)
        return answers


@pytest.fixture
def served(folder: Path) -> Iterator[Guided]:
    made = Guided(folder)
    yield made
    made.runs.close()


def step(sequence_id: int, sampling: Sampling, tree: TokenTree | None = None, sent: int = 0) -> StepRequest:
    delta = delta_of(Context(PROMPT), sent, sequence_id, "")
    return StepRequest(delta, tree or TokenTree.bare(), sampling, StepOptions(), 60_000)


def run(sequence_id: int, sampling: Sampling) -> StepRequest:
    options = RunOptions("none", "{}", Limits(MAX_TOKENS, 512, 32), 0, (0,), ())
    return replace(step(sequence_id, sampling), run=options)


def truth(folder: Path, plain: StockModel, grammar: Grammar, sampling: Sampling) -> list[int]:
    """The text of the target alone under the grammar, by the reference."""
    matcher = Grammars(folder / "tokenizer.json", VOCAB_SIZE, [0]).matcher(grammar, [0])

    def legal(output: Any) -> BoolArray:
        matcher.follow(output)
        return matcher.legal([])

    return reference.generate(plain.logits, PROMPT, sampling, MAX_TOKENS, (0,), legal)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["none", "prompt_lookup", "suffix", "recycling", "jacobi"])
def test_a_guided_run_and_guided_steps_say_what_the_target_alone_says(
    served: Guided, folder: Path, plain: StockModel, method: str, sampling: dict[str, Any]
) -> None:
    guided, stop = sampling_of(SOUND, **sampling), StopRule(MAX_TOKENS, frozenset({0}))
    expected = truth(folder, plain, SOUND, guided)
    plan = select_method(method, "{}", frozenset(), {})
    options = RunOptions(method, plan.config_json, Limits(MAX_TOKENS, 512, 32), 0, (0,), ())
    sequence = sequence_of(folder, guided, stop, StepOptions())
    in_run = generate_text(sequence, StepsOfRun(sequence, Caller(served, 1, sequence, options)))
    sequence = sequence_of(folder, guided, stop, StepOptions())
    dependencies = support.dependencies(
        vocab_size=VOCAB_SIZE, memory=served.memory.of(""), matcher=served.grammars.matcher(SOUND, [0]), max_nodes=32
    )
    steps = StepByStep(sequence, EngineTarget(served.engine, 2), plan.proposer(dependencies))
    by_step = generate_text(sequence, steps)
    assert in_run[0].ids == by_step[0].ids == expected and len(expected) > 4
    assert in_run == by_step, "the same nodes are left out in a run and step by step"


def test_no_mask_is_made_on_the_engine_s_thread(served: Guided, folder: Path) -> None:
    sequence = sequence_of(folder, sampling_of(SOUND), StopRule(MAX_TOKENS), StepOptions())
    options = RunOptions("suffix", "{}", Limits(MAX_TOKENS, 512, 32), 0, (), ())
    generate_text(sequence, StepsOfRun(sequence, Caller(served, 1, sequence, options)))
    served.submit(step(2, sampling_of(SOUND), TokenTree.chain([1, 2]))).get(timeout=LIMIT_S)
    assert served.grammars.threads == {"guide"}


@pytest.mark.parametrize("make", [run, step], ids=["run", "step"])
def test_a_grammar_that_hangs_holds_up_its_own_request_alone(
    served: Guided, folder: Path, plain: StockModel, make: Any
) -> None:
    served.grammars.slow = hang = Hang()
    late = served.submit(make(1, sampling_of(SLOW)))
    try:
        assert hang.begun.wait(LIMIT_S)
        # Whole texts of others, with a grammar and without, in runs and step by step, while its mask is being made.
        for number, grammar in enumerate((None, SOUND), start=2):
            sampling = sampling_of(grammar)
            expected = reference.generate(plain.logits, PROMPT, sampling, MAX_TOKENS)
            if grammar:
                expected = truth(folder, plain, grammar, sampling)
            for offset, source in enumerate((Caller, None)):
                sequence = sequence_of(folder, sampling, StopRule(MAX_TOKENS, frozenset({0})), StepOptions())
                options = RunOptions("none", "{}", Limits(MAX_TOKENS, 512, 32), 0, (0,), ())
                name = 10 * number + offset
                steps = (
                    StepsOfRun(sequence, Caller(served, name, sequence, options))
                    if source
                    else StepByStep(sequence, EngineTarget(served.engine, name), served.proposer("none", "{}", ()))
                )
                assert generate_text(sequence, steps)[0].ids == expected
        assert late.empty() and not hang.ended.is_set()
    finally:
        hang.let_go.set()
    answer = late.get(timeout=LIMIT_S)
    first = answer[0].tokens if isinstance(answer, list) else [answer.next_token]
    assert first[0] == truth(folder, plain, SLOW, sampling_of(SLOW))[0]


@pytest.mark.parametrize("make", [run, step], ids=["run", "step"])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RequestError("the guide grows too complex"), "too complex"),
        (KeyError("planted"), "internal error of an engine"),
    ],
    ids=["refused", "a bug"],
)
def test_a_grammar_that_breaks_is_told_to_its_own_request(
    served: Guided, make: Any, error: Exception, words: str
) -> None:
    served.grammars.error = error
    broken = served.submit(make(1, sampling_of(BROKEN)))
    other = served.submit(make(2, sampling_of(SOUND)))
    found = broken.get(timeout=LIMIT_S)
    assert isinstance(found, RequestError if isinstance(error, ServingError) else EngineError) and words in str(found)
    assert not isinstance(other.get(timeout=LIMIT_S), ServingError)


def test_masks_belong_to_the_nodes_of_the_step(served: Guided) -> None:
    a, b, c, d, x, y = 1, 2, 3, 4, 24, 25
    tree, seen = TokenTree.from_paths([[a, b], [c], [x, a]]), []
    guided = served.engine._with_masks(step(1, sampling_of(SOUND), tree))
    for path, legal in zip(tree.paths, guided.legal, strict=True):
        seen.append((path, np.flatnonzero(legal).tolist() if not legal.all() else "all"))
    assert seen == [
        ((), [a, c, x]),
        ((a,), [b]),
        ((a, b), [a, c, x]),
        ((c,), [d]),
        ((x,), [y]),
        ((x, a), "all"),  # "xa" breaks the grammar: the node is never accepted
    ]


def test_steps_of_one_sequence_take_turns_and_a_lost_one_is_asked_for_again(served: Guided) -> None:
    served.grammars.slow = hang = Hang()
    first = served.submit(step(1, sampling_of(SLOW)))
    assert hang.begun.wait(LIMIT_S)
    assert isinstance(served.submit(step(1, sampling_of(SLOW))).get(timeout=LIMIT_S), Unavailable)
    hang.let_go.set()
    assert not isinstance(first.get(timeout=LIMIT_S), ServingError)
    served.engine.release(1)
    assert isinstance(served.submit(step(1, sampling_of(SLOW), sent=4)).get(timeout=LIMIT_S), UnknownSequence)
    assert not served.engine._guided


def test_an_engine_without_a_tokenizer_refuses_a_grammar(folder: Path) -> None:
    engine = start_target(make_paged(folder))
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.submit(step(1, sampling_of(SOUND)), time.monotonic() + LIMIT_S, answers.put)
    assert "without a tokenizer" in str(answers.get(timeout=LIMIT_S))
    engine.close()
