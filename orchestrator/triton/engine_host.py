"""Hosts an engine as a Triton model: requests in, answers from the engine's thread; knows no engine's inside."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from orchestrator import wire
from orchestrator.errors import EngineError, ServingError
from orchestrator.tensors import Tensors
from orchestrator.triton import pb
from orchestrator.triton.gauges import EngineGauges
from orchestrator.types import EngineStatus
from orchestrator.wire_errors import error_text
from orchestrator.workers import Workers

Request = TypeVar("Request")
Contra = TypeVar("Contra", contravariant=True)

DEFAULT_DEADLINE_MS = 60_000
NUM_SLOW = 2
# What is prepared gives up by itself before this (grammar.LIMIT_S, once to begin and once to end).
SLOW_LIMIT_S = 5.0
# Shorter than callers wait before they try again: by then no thread holds a lock in the memory shared with Triton,
# which aborts when a process dies that does (triton#8882).
QUIET_S = 0.1

log = logging.getLogger(__name__)


class EngineLine(Protocol[Contra]):
    """An engine thread, as the host sees it."""

    def preparation(self, request: Contra) -> Callable[[], None] | None:
        """Return what is to be done before `submit`, on a thread that may take its time; None as a rule."""

    def submit(self, request: Contra, deadline_s: float, on_answer: Callable[[Any], None]) -> None:
        """Queue a call that is answered once, by its deadline."""

    def release(self, sequence_id: int) -> None:
        """Queue the end of a sequence."""

    def watch(self, report: Callable[[EngineStatus], None]) -> None:
        """Let `report` have the engine's figures, now and then, on the engine's thread."""

    def on_broken(self, end: Callable[[], None]) -> None:
        """Let `end` be called when the engine has stopped on an internal error and answered every call."""

    def close(self) -> None:
        """Stop the thread."""


class EngineHost(Generic[Request]):
    """The Triton side of the `target` and the drafter models.

    model: name of the Triton model. unpack: tensors → request, raising ServingError. pack: answer → tensors.
    Law: every Triton request gets one response with its FINAL flag in the same send.
    """

    def __init__(
        self,
        model: str,
        engine: EngineLine[Request],
        unpack: Callable[[Tensors], Request],
        pack: Callable[[Any], Tensors],
    ) -> None:
        self._engine = engine
        self._unpack = unpack
        self._pack = pack
        self._slow: Workers[None] = Workers("preparation", NUM_SLOW)
        engine.watch(EngineGauges(model).update)
        engine.on_broken(_end_process)

    def execute(self, requests: list[Any]) -> list[None]:
        """Hand the requests to the engine thread, which answers through their senders."""
        for request in requests:
            self._accept(pb.tensors_of(request), request.get_response_sender())
        return [None] * len(requests)

    def finalize(self) -> None:
        """Stop the engine thread, within a limit; what is still being prepared is refused."""
        self._slow.close("the engine is shutting down", SLOW_LIMIT_S)
        self._engine.close()

    def _accept(self, tensors: Tensors, sender: Any) -> None:
        try:
            if sequence_id := wire.released(tensors):
                self._engine.release(sequence_id)
                pb.send(sender, {}, final=True)
                return
            request = self._unpack(tensors)
        except Exception as error:
            self._send_error(sender, error)
            return
        deadline_s = time.monotonic() + wire.deadline_ms(tensors, DEFAULT_DEADLINE_MS) / 1000
        if work := self._engine.preparation(request):
            self._slow.start(work).add_done_callback(partial(self._prepared, request, deadline_s, sender))
        else:
            self._submit(request, deadline_s, sender)

    def _prepared(self, request: Request, deadline_s: float, sender: Any, work: Future[None]) -> None:
        """Go on with a call whose preparation has ended, or was given up; called once."""
        if error := work.exception():
            self._send_error(sender, error)
        else:
            self._submit(request, deadline_s, sender)

    def _submit(self, request: Request, deadline_s: float, sender: Any) -> None:
        self._engine.submit(request, deadline_s, lambda answer: self._answer(sender, answer))

    def _answer(self, sender: Any, answer: Any) -> None:
        try:
            if isinstance(answer, ServingError):
                raise answer
            pb.send(sender, self._pack(answer), final=True)
        except Exception as error:
            self._send_error(sender, error)

    @staticmethod
    def _send_error(sender: Any, error: BaseException) -> None:
        if not isinstance(error, ServingError):
            error = EngineError(f"{type(error).__name__}: {error}")
        pb.send_error(sender, error_text(error), error)


def _end_process() -> None:
    """End the process, threads and all, in a quiet moment: nobody mends an engine, but the launcher starts another."""
    log.critical("process %d ends, since its engine is broken", os.getpid())
    time.sleep(QUIET_S)
    os._exit(1)
