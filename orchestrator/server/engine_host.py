"""Hosts an engine as a Triton model: hands it the requests, and sends its answers from the engine's own thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from orchestrator.core.deployment.config import ServingConfig, load_config
from orchestrator.core.errors import EngineError, ServingError, error_text
from orchestrator.core.messages.checks import check_draft
from orchestrator.core.messages.codec import Call
from orchestrator.core.messages.context import Release
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.types import DraftCounts, EngineStatus
from orchestrator.core.worker_pool import WorkerPool
from orchestrator.server import pb
from orchestrator.server.logs import configure_logging
from orchestrator.server.metrics import (
    DRAFT_FAMILIES,
    ENGINE_FAMILIES,
    MetricsExporter,
    draft_values,
    engine_values,
    info_values,
)

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Contra = TypeVar("Contra", contravariant=True)

DEFAULT_DEADLINE_MS = 60_000
# Threads that prepare new requests: enough that requests do not wait for those whose grammar is being compiled.
NUM_PREPARING = 8
# A preparation gives up before this (grammar.LIMIT_S, once to begin and once to end).
PREPARATION_LIMIT_S = 5.0
# Triton aborts when a process dies while it holds a lock in the memory they share (triton#8882). After this pause no
# thread holds one: it is shorter than callers wait before they try again.
QUIET_S = 0.1


class EngineClient(Protocol[Contra]):
    """An engine thread, as the host sees it."""

    def preparation(self, request: Contra) -> Callable[[], None] | None:
        """Return slow work that must be done before `submit`, off the engine's thread; usually None."""

    def submit(self, request: Contra, deadline_s: float, on_answer: Callable[[Any], None]) -> None:
        """Queue a call that is answered once, by its deadline."""

    def release(self, sequence_id: int) -> None:
        """Queue the end of a sequence."""

    def watch(self, report: Callable[[EngineStatus], None]) -> None:
        """Call `report` with the engine's status twice a second, on the engine's thread."""

    def on_broken(self, end: Callable[[], None]) -> None:
        """Call `end` when the engine has stopped on an internal error and answered every call."""

    def close(self) -> None:
        """Stop the thread."""


class HostedDrafter(Protocol):
    """A drafter in the target's process, as the host sees it. kernels: what computes its drafts. counts: its calls."""

    kernels: str
    counts: DraftCounts

    def status(self) -> EngineStatus:
        """Return its engine's status; called twice a second."""


class EngineHost(Generic[Request]):
    """Serves an engine's calls.

    model: name of the Triton model. checked: returns a call that the engine takes and whose invariants hold; raises
    ServingError for any other.
    drafters: those in this process; their metrics are shown as if each were a Triton model.
    Invariant: every Triton request gets one response with its FINAL flag in the same send.
    """

    def __init__(
        self,
        model: str,
        engine: EngineClient[Request],
        checked: Callable[[Call], Request],
        drafters: Mapping[str, HostedDrafter] = MappingProxyType({}),
    ) -> None:
        self._engine = engine
        self._checked = checked
        self._preparations: WorkerPool[None] = WorkerPool("preparation", NUM_PREPARING)
        #: What computes the passes: torch, native, or the engine itself if it is compiled.
        self.kernels: str = getattr(engine, "kernels", "engine")
        self._exporter = MetricsExporter(ENGINE_FAMILIES, model=model)
        self._model, self._drafters = model, dict(drafters)
        self._exporters: dict[str, tuple[MetricsExporter, MetricsExporter]] = {}
        engine.watch(self._show)
        engine.on_broken(_end_process)

    def show_info(self, config: ServingConfig) -> None:
        """Show how the engine and the drafters beside it compute."""
        self._exporter.show(info_values(config, self.kernels))
        for name, drafter in self._drafters.items():
            self._exporters_of(name)[0].show(info_values(config, drafter.kernels))

    def execute(self, requests: list[Any]) -> list[None]:
        """Hand the requests to the engine thread, which answers through their senders."""
        for request in requests:
            self._accept(request, request.get_response_sender())
        return [None] * len(requests)

    def finalize(self) -> None:
        """Stop the engine thread, within a limit; calls that are still being prepared fail."""
        self._preparations.close("the engine is shutting down", PREPARATION_LIMIT_S)
        self._engine.close()

    def _show(self, status: EngineStatus) -> None:
        self._exporter.show(engine_values(status))
        for name, drafter in self._drafters.items():
            engine, calls = self._exporters_of(name)
            engine.show(engine_values(drafter.status()))
            calls.show(draft_values(drafter.counts, is_open=False))

    def _exporters_of(self, name: str) -> tuple[MetricsExporter, MetricsExporter]:
        """Return the exporters of a drafter's engine and of the calls to it."""
        if name not in self._exporters:
            calls = MetricsExporter(DRAFT_FAMILIES, model=self._model, drafter=name)
            self._exporters[name] = MetricsExporter(ENGINE_FAMILIES, model=name), calls
        return self._exporters[name]

    def _accept(self, call: Any, sender: Any) -> None:
        try:
            received = pb.call_of(call)
            if isinstance(received, Release):
                self._engine.release(received.sequence_id)
                pb.answer(sender, None)
                return
            request = self._checked(received)
        except Exception as error:
            self._send_error(sender, error)
            return
        deadline_s = time.monotonic() + (getattr(received, "deadline_ms", 0) or DEFAULT_DEADLINE_MS) / 1000
        if work := self._engine.preparation(request):
            prepared = self._preparations.start(work).future
            prepared.add_done_callback(partial(self._prepared, request, deadline_s, sender))
        else:
            self._submit(request, deadline_s, sender)

    def _prepared(self, request: Request, deadline_s: float, sender: Any, work: Future[None]) -> None:
        """Go on with a call whose preparation has ended or was abandoned."""
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
            pb.answer(sender, answer)
        except Exception as error:
            self._send_error(sender, error)

    @staticmethod
    def _send_error(sender: Any, error: BaseException) -> None:
        if not isinstance(error, ServingError):
            log.error("a call failed", exc_info=error)
            error = EngineError("internal error of an engine; the server's log has the cause")
        pb.send_error(sender, error_text(error), error)


def drafter_host(model: str, engine: EngineClient[DraftRequest]) -> EngineHost[DraftRequest]:
    """Return the host of a drafter."""
    return EngineHost(model, engine, _checked_draft)


def _checked_draft(call: Call) -> DraftRequest:
    if not isinstance(call, DraftRequest):
        raise EngineError(f"a drafter takes drafts and releases, not {type(call).__name__}")
    check_draft(call)
    return call


class EngineModel:
    """Triton's entry points of a model that hosts an engine; each model's own file defines how to load the engine."""

    _host: EngineHost[Any]

    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[Any]:
        """Load the engine and warm it up. args: Triton's own arguments."""
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model that the deployment names."""
        configure_logging(args["model_name"])
        config = load_config(os.environ["SERVING_CONFIG"])
        self._host = self.load(args, config)
        self._host.show_info(config)

    def execute(self, requests: list[Any]) -> list[None]:
        """Hand the requests to the engine."""
        return self._host.execute(requests)

    def finalize(self) -> None:
        """Stop the engine."""
        self._host.finalize()


class HeadModel(EngineModel):
    """Triton's entry points of a drafting head; each head's own file says with which function it is built.

    build: (the Triton model's name, which is the head's key in the deployment file, deployment) → the head's engine.
    """

    build: Callable[[str, ServingConfig], EngineClient[DraftRequest]]

    def load(self, args: dict[str, str], config: ServingConfig) -> EngineHost[DraftRequest]:
        """Load the head that the deployment names and warm it up."""
        model = args["model_name"]
        return drafter_host(model, self.build(model, config))


def _end_process() -> None:
    """End the process with all its threads, in a quiet moment; the launcher will start another."""
    log.critical("process %d ends, because its engine is broken", os.getpid())
    time.sleep(QUIET_S)
    os._exit(1)
