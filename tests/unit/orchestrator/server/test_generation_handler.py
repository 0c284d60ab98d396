"""What a request leaves in the server's memory: its response when it ended by itself, and only after its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from auditor.reference import decoding as reference
from native.response_memory import NativeMemory
from orchestrator.core.deployment.checkpoint import Checkpoint
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import ClientDisconnected, EngineError, EngineLost
from orchestrator.core.grammar import Grammars
from orchestrator.core.sampling_params import Sampling
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import read
from orchestrator.server.request_builder import RequestBuilder
from tests.support.decode import stepping
from tests.support.hanging import until
from tests.support.table_target import TableTarget
from tests.support.tiny_models import VOCAB_SIZE, write_byte_tokenizer
from tests.support.without_triton import NoMetrics, imported

PROMPT = [1, 2, 3]


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the request handler, imported without Triton, its target a table."""
    with imported("generation_handler") as module:
        monkeypatch.setattr(module, "BlsTargetClient", lambda *args: TableTarget(VOCAB_SIZE))
        yield module


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> RequestBuilder:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = ServingConfig(target="t", remember_tokens=1000)
    checkpoint = Checkpoint(tokenizer, VOCAB_SIZE, 512, frozenset())
    return RequestBuilder(config, checkpoint, frozenset(), Grammars(folder / "tokenizer.json", VOCAB_SIZE, []))


class Spy(NativeMemory):
    """Notes what it learns, among the other events of a request."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__(1000)
        self.events = events

    def learn(self, salt: str, tokens: Any) -> None:
        self.events.append(("learn", salt, list(tokens)))
        super().learn(salt, tokens)


def run(
    handlers: ModuleType,
    builder: RequestBuilder,
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled: Callable[[], bool] = lambda: False,
    deadline_s: float = 1e12,
    **inputs: Any,
) -> list[Any]:
    """Run one request and return its events, in order."""
    events: list[Any] = []
    memory = Spy(events)
    monkeypatch.setattr(handlers.pb, "send", lambda *args, **keys: events.append("send"))
    monkeypatch.setattr(handlers.pb, "send_final", lambda sender: events.append("final"))
    monkeypatch.setattr(handlers.pb, "send_error", lambda *args: events.append("error"))

    def dependencies(request: GenerationRequest) -> ProposerDependencies:
        return ProposerDependencies(
            pytest.fail, VOCAB_SIZE, prediction=request.prediction, memory=memory.of(request.inputs.cache_salt)
        )

    request = read({}, json.dumps({"input_ids": PROMPT, "cache_salt": "s", "max_tokens": 9, **inputs}))
    sender = SimpleNamespace(is_cancelled=is_cancelled)
    handlers.GenerationHandler(
        request, sender, deadline_s, builder, stepping(dependencies), lambda *_: None, memory, NoMetrics()
    ).run()
    return events


def learnt(events: list[Any]) -> list[int]:
    return [token for event in events if event[0] == "learn" for token in event[2]]


def test_response_is_learnt_under_its_salt_after_the_final_flag_whatever_the_method(
    handlers: ModuleType, builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = reference.generate(TableTarget(VOCAB_SIZE).logits, PROMPT, Sampling(), 9)
    for method in ("none", "suffix", "ngram", "prompt_lookup"):
        events = run(handlers, builder, monkeypatch, speculation=method)
        assert events[-2:] == ["final", ("learn", "s", truth)] and "error" not in events


def test_tokens_after_a_stop_are_not_learnt(
    handlers: ModuleType, builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though one step may have accepted them with the stop."""
    truth = reference.generate(TableTarget(VOCAB_SIZE).logits, PROMPT, Sampling(), 9)
    end = truth.index(truth[4]) + 1
    events = run(handlers, builder, monkeypatch, stop_ids=[truth[4]], draft_input_ids=truth)
    assert learnt(events) == truth[:end]
    assert learnt(run(handlers, builder, monkeypatch, draft_input_ids=truth)) == truth


def test_request_that_was_broken_off_or_failed_leaves_nothing(
    handlers: ModuleType, builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "CANCEL_POLL_S", 0.0)
    polls = iter([False, False, False])
    cancelled = run(handlers, builder, monkeypatch, is_cancelled=lambda: next(polls, True), stream=True)
    assert cancelled.count("send") > 2 and not learnt(cancelled)

    class Slow(TableTarget):
        def step(self, *args: Any) -> Any:
            time.sleep(0.02)
            return super().step(*args)

    monkeypatch.setattr(handlers, "BlsTargetClient", lambda *args: Slow(VOCAB_SIZE))
    late = run(handlers, builder, monkeypatch, deadline_s=time.monotonic() + 0.2, stream=True, max_tokens=400)
    assert late.count("send") > 2 and not learnt(late)

    class Broken(TableTarget):
        def step(self, *args: Any) -> Any:
            raise EngineError("broken")

    monkeypatch.setattr(handlers, "BlsTargetClient", lambda *args: Broken())
    assert run(handlers, builder, monkeypatch) == ["error"]


def test_text_so_far_is_sent_when_the_target_is_lost_until_the_deadline(
    handlers: ModuleType, builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(TableTarget):
        def step(self, *args: Any) -> Any:
            if self.num_steps < 5:
                return super().step(*args)
            time.sleep(0.1)
            raise EngineLost("it has gone")

    monkeypatch.setattr(handlers, "BlsTargetClient", lambda *args: Lost(VOCAB_SIZE))
    in_time = run(handlers, builder, monkeypatch, deadline_s=time.monotonic() + 60, speculation="none", stream=True)
    assert in_time == ["send"] * 5 + ["error"]
    late = run(handlers, builder, monkeypatch, deadline_s=time.monotonic() + 0.1, speculation="none", stream=True)
    assert late == ["send"] * 6 + ["final", ("learn", "s", [])]


def test_a_client_that_goes_while_a_step_waits_ends_its_request(
    handlers: ModuleType, builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = iter([False])
    released: list[int] = []

    class Waiting(TableTarget):
        def __init__(self, salt: str, deadline_s: float, max_len: int, is_unwanted: Callable[[], bool]) -> None:
            super().__init__(VOCAB_SIZE)
            self.is_unwanted = is_unwanted

        def step(self, *args: Any) -> Any:
            until(self.is_unwanted)
            raise ClientDisconnected("the client has gone")

        def release(self) -> None:
            released.append(self.num_steps)

    monkeypatch.setattr(handlers, "BlsTargetClient", Waiting)
    events = run(handlers, builder, monkeypatch, is_cancelled=lambda: next(polls, True), stream=True)
    assert events == ["send", "final", ("learn", "s", [])] and released == [0]


def test_ngram_without_statistics_is_one_error_to_the_client(
    handlers: ModuleType, builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(handlers.pb, "send_error", lambda sender, message, error: messages.append(message))
    request = read({}, json.dumps({"input_ids": PROMPT, "speculation": "ngram"}))
    sender = SimpleNamespace(is_cancelled=lambda: False)
    handlers.GenerationHandler(
        request,
        sender,
        1e12,
        builder,
        stepping(lambda request: ProposerDependencies(pytest.fail, VOCAB_SIZE)),
        lambda *_: None,
        None,
        NoMetrics(),
    ).run()
    assert len(messages) == 1 and "ngram_tables, corpus_index and remember_tokens" in messages[0]
