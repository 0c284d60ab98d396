"""Hosts an engine as a Triton model: requests in, answers from the engine's thread; knows no engine's inside."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from orchestrator.core.errors import EngineError, ServingError
from orchestrator.core.types import EngineStatus
from orchestrator.core.worker_pool import WorkerPool
from orchestrator.triton import pb
from orchestrator.wire.context import released_sequence
from orchestrator.wire.tensors import Tensors, error_text, scalar

FAMILIES = {
    "spec_kv_blocks": ("gauge", "KV blocks: held by sequences, cached (found by content), free, total"),
    "spec_sequences": ("gauge", "Sequences that hold KV blocks"),
    "spec_passes_total": ("counter", "Forward passes"),
    "spec_pass_requests_total": ("counter", "Requests in these passes; divided by the passes: occupancy"),
}

log = logging.getLogger(__name__)


class EngineGauges:
    """The series of one Triton model; `update` is made for the engine's own thread, twice a second.

    Invariant: once an engine has been idle for a second, the port shows its figures of now.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._families = {name: pb.metric_family(name, *rest) for name, rest in FAMILIES.items()}
        self._series: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], int] = {}
        self._broken = False

    def update(self, status: EngineStatus) -> None:
        """Show the figures; a metrics port that fails is left alone, since no request may suffer from it."""
        if self._broken:
            return
        try:
            self._show(status)
        except Exception:
            self._broken = True
            log.exception("no more metrics of model %s", self._model)

    def _show(self, status: EngineStatus) -> None:
        blocks = {
            "held": status.blocks_held,
            "cached": status.blocks_cached,
            "free": status.blocks_free,
            "total": status.blocks_total,
        }
        for state, number in blocks.items():
            self._set("spec_kv_blocks", number, state)
        self._set("spec_sequences", status.num_sequences)
        self._set("spec_passes_total", status.num_passes)
        self._set("spec_pass_requests_total", status.num_calls)

    def _set(self, family: str, value: int, state: str = "") -> None:
        key = (family, state)
        if key not in self._series:
            labels = {"model": self._model} | ({"state": state} if state else {})
            self._series[key] = self._families[family].Metric(labels=labels)
        elif value == self._shown[key]:
            return
        if FAMILIES[family][0] == "counter":
            self._series[key].increment(value - self._shown.get(key, 0))
        else:
            self._series[key].set(value)
        self._shown[key] = value


Request = TypeVar("Request")
Contra = TypeVar("Contra", contravariant=True)

DEFAULT_DEADLINE_MS = 60_000
NUM_SLOW = 2
# What is prepared gives up by itself before this (grammar.LIMIT_S, once to begin and once to end).
SLOW_LIMIT_S = 5.0
# Shorter than callers wait before they try again: by then no thread holds a lock in the memory shared with Triton,
# which aborts when a process dies that does (triton#8882).
QUIET_S = 0.1


class EngineClient(Protocol[Contra]):
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
    Invariant: every Triton request gets one response with its FINAL flag in the same send.
    """

    def __init__(
        self,
        model: str,
        engine: EngineClient[Request],
        unpack: Callable[[Tensors], Request],
        pack: Callable[[Any], Tensors],
    ) -> None:
        self._engine = engine
        self._unpack = unpack
        self._pack = pack
        self._preparations: WorkerPool[None] = WorkerPool("preparation", NUM_SLOW)
        engine.watch(EngineGauges(model).update)
        engine.on_broken(_end_process)

    def execute(self, requests: list[Any]) -> list[None]:
        """Hand the requests to the engine thread, which answers through their senders."""
        for request in requests:
            self._accept(pb.tensors_of(request), request.get_response_sender())
        return [None] * len(requests)

    def finalize(self) -> None:
        """Stop the engine thread, within a limit; what is still being prepared is refused."""
        self._preparations.close("the engine is shutting down", SLOW_LIMIT_S)
        self._engine.close()

    def _accept(self, tensors: Tensors, sender: Any) -> None:
        try:
            if sequence_id := released_sequence(tensors):
                self._engine.release(sequence_id)
                pb.send(sender, {}, final=True)
                return
            request = self._unpack(tensors)
        except Exception as error:
            self._send_error(sender, error)
            return
        deadline_s = time.monotonic() + scalar(tensors, "deadline_ms", DEFAULT_DEADLINE_MS) / 1000
        if work := self._engine.preparation(request):
            self._preparations.start(work).future.add_done_callback(
                partial(self._prepared, request, deadline_s, sender)
            )
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
