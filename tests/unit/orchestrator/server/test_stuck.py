"""What hangs in a request or an engine's preparation: every call is answered once all the same, stopping is not held up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from orchestrator.core.deployment.checkpoint import Checkpoint
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import RequestError, Unavailable
from orchestrator.core.grammar import Grammars
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.server.inputs import read
from orchestrator.server.request_builder import RequestBuilder
from tests.support.decode import stepping
from tests.support.hanging import WAIT_S, Hang, until
from tests.support.table_target import TableTarget
from tests.support.tiny_models import VOCAB_SIZE, write_byte_tokenizer
from tests.support.without_triton import NoMetrics, imported

Answers = list[tuple[Any, str]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Who was sent what, in order."""
    return []


def listen(module: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: Answers) -> None:
    """Let a module's answers be noted."""
    monkeypatch.setattr(module.pb, "send", lambda sender, tensors, final: answers.append((sender, f"sent {final}")))
    monkeypatch.setattr(module.pb, "answer", lambda sender, tensors: answers.append((sender, "sent True")))
    monkeypatch.setattr(module.pb, "send_error", lambda sender, text, error: answers.append((sender, text)))
    monkeypatch.setattr(module.pb, "send_final", lambda sender: answers.append((sender, "final")))


# Preparations


class Line:
    """An engine line that answers at once, and whose preparations are what the request says."""

    def __init__(self) -> None:
        self.is_closed = False
        self.watch = self.on_broken = lambda call: None

    def preparation(self, request: Callable[[], None] | None) -> Callable[[], None] | None:
        return request

    def submit(self, request: Any, deadline_s: float, on_answer: Callable[[Any], None]) -> None:
        on_answer(Unavailable("closed") if self.is_closed else "answer")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Iterator[ModuleType]:
    with imported("engine_host") as module:
        listen(module, monkeypatch, answers)
        monkeypatch.setattr(module, "MetricsExporter", lambda *families, **labels: SimpleNamespace(show=None))
        monkeypatch.setattr(module.pb, "call_of", lambda request: request)
        yield module


def ask(engine: Any, name: str, work: Callable[[], Any] | None) -> None:
    """Send one request, whose sender is its name."""
    tensors = SimpleNamespace(get_response_sender=lambda: name, work=work)
    engine.execute([tensors])


def hosting(module: ModuleType) -> Any:
    return module.EngineHost("target", Line(), lambda call: call.work)


def test_calls_are_answered_once_while_others_hang_in_preparation(host: ModuleType, answers: Answers) -> None:
    engine, hang = hosting(host), Hang(None)
    ask(engine, "hung", hang)
    for number in range(5):
        ask(engine, f"prepared {number}", lambda: None)
    ask(engine, "unprepared", None)
    until(lambda: len(answers) == 6)
    assert {said for _, said in answers} == {"sent True"} and "hung" not in dict(answers)
    hang.let_go.set()
    until(lambda: len(answers) == 7)
    assert answers[-1] == ("hung", "sent True")
    engine.finalize()


def test_a_preparation_that_fails_is_its_request_s_alone(host: ModuleType, answers: Answers) -> None:
    class Panic(BaseException):
        """As pyo3's: beside Exception."""

    def refuse() -> None:
        raise RequestError("no such guide")

    def panic() -> None:
        raise Panic("at the library")

    engine = hosting(host)
    for name, work in (("refused", refuse), ("panicking", panic), ("sound", lambda: None)):
        ask(engine, name, work)
    until(lambda: len(answers) == 3)
    assert dict(answers) == {
        "refused": "request: no such guide", "panicking": "engine: internal error of an engine; the server's log has the cause", "sound": "sent True",
    }  # fmt: skip
    engine.finalize()


def test_stopping_is_not_held_up_by_preparations_and_each_call_is_answered_once(
    host: ModuleType, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PREPARATION_LIMIT_S", 0.05)
    engine, hung = hosting(host), [Hang(None) for _ in range(host.NUM_PREPARING)]
    for number, hang in enumerate(hung):
        ask(engine, f"hung {number}", hang)
    for number in range(3):
        ask(engine, f"waiting {number}", lambda: pytest.fail("it was prepared after the end"))
    for hang in hung:
        assert hang.begun.wait(WAIT_S)
    engine.finalize()
    ask(engine, "late", lambda: None)
    waiting = [f"waiting {number}" for number in range(3)]
    assert sorted(dict(answers)) == [*(f"hung {number}" for number in range(len(hung))), "late", *waiting]
    assert {said for _, said in answers} == {"unavailable: the engine is shutting down"} and len(answers) == len(
        hung
    ) + 4
    for hang in hung:
        hang.let_go.set()
    until(lambda: not any(thread.name == "preparation" for thread in threading.enumerate()))
    assert len(answers) == len(hung) + 4


# Refusals


def test_a_refusal_reaches_its_client_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, answers: Answers
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with imported("public_host") as module:
        monkeypatch.setattr(module, "send_error", lambda sender, error, _: answers.append((sender, str(error))))
        host = module.PublicHost()
        host._refusals = module.WorkerPool("refusal", 1)
        with monkeypatch.context() as system:
            system.setattr(threading.Thread, "start", no_thread)
            host._send_refusal("first", Unavailable("full"))
        host._send_refusal("second", Unavailable("full"))
        until(lambda: len(answers) == 2)
    assert answers == [("first", "full"), ("second", "full")]


# Sequences of one request


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> Iterator[ModuleType]:
    with imported("generation_handler") as module:
        listen(module, monkeypatch, answers)
        monkeypatch.setattr(module, "GRACE_S", 0.3)
        yield module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Checkpoint(Tokenizer.from_file(str(folder / "tokenizer.json")), VOCAB_SIZE, 512, frozenset())


class Stuck(TableTarget):
    """A target of which one step hangs, or a release."""

    hang: Hang
    where = "step"

    def step(self, *given: Any) -> Any:
        if self.where == "step" and self.num_steps == 3:
            self.hang()
        return super().step(*given)

    def release(self) -> None:
        if self.where == "release":
            self.hang()


def serve(module: ModuleType, checkpoint: Checkpoint, targets: list[TableTarget], streams: bool, **inputs: Any) -> None:
    """Serve one request for as many sequences as there are targets, to its end."""
    left = iter(targets)
    module.BlsTargetClient = lambda *given: next(left)
    asked = {"input_ids": [1, 2, 3], "max_tokens": 8, "speculation": "none", "num_return_sequences": len(targets)}
    builder = RequestBuilder(ServingConfig(target="t"), checkpoint, frozenset(), Grammars("", VOCAB_SIZE, []), streams)
    sender = SimpleNamespace(is_cancelled=lambda: False)
    deadline_s = time.monotonic() + 6.0  # enough for those that are not stuck, also on a loaded machine
    materials = ProposerDependencies(pytest.fail, VOCAB_SIZE)
    given = read({}, json.dumps(asked | inputs))
    module.GenerationHandler(
        given, sender, deadline_s, builder, stepping(lambda job: materials), lambda *_: None, None, NoMetrics()
    ).run()


@pytest.mark.parametrize("stream", [True, False])
def test_a_stuck_sequence_is_abandoned_at_the_deadline_and_says_nothing_after_it(
    handlers: ModuleType, checkpoint: Checkpoint, answers: Answers, stream: bool
) -> None:
    stuck = Stuck(VOCAB_SIZE)
    stuck.hang = hang = Hang()
    serve(handlers, checkpoint, [TableTarget(VOCAB_SIZE), stuck], streams=stream, stream=stream)
    said = [text for _, text in answers]
    assert said[-1] == "busy: a sequence did not end by the request's deadline"
    assert said[:-1] == ["sent False"] * (8 + 3 if stream else 0)
    hang.let_go.set()
    assert hang.ended.wait(WAIT_S)
    until(lambda: not any(thread.name == "sequence" for thread in threading.enumerate()))
    assert stuck.num_steps > 3 and [text for _, text in answers] == said


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_was_answered_gets_no_error_for_a_release_that_hangs(
    handlers: ModuleType, checkpoint: Checkpoint, answers: Answers, stream: bool
) -> None:
    stuck = Stuck(VOCAB_SIZE)
    stuck.hang, stuck.where = Hang(), "release"
    serve(handlers, checkpoint, [TableTarget(VOCAB_SIZE), stuck], streams=stream, stream=stream)
    assert [text for _, text in answers] == (["sent False"] * 16 + ["final"] if stream else ["sent True"])
    stuck.hang.let_go.set()
