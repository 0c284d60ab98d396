"""What the clients of all engines share: the thread that answers calls, reports a status, and at its end refuses."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic

from orchestrator.core.errors import Draining, EngineLost, ServingError
from orchestrator.core.types import EngineStatus
from runtime.engine.calls import Request

log = logging.getLogger(__name__)

REPORT_S = 0.5
SHUTTING_DOWN = "the engine is shutting down"
BROKEN = "the engine stopped on an internal error"


class ClientThread(ABC, Generic[Request]):
    """The thread of one engine, from `start` until the client is closed or the engine fails.

    FAILURE: what the log says when the engine fails.
    Invariant: every call is answered exactly once; after the end, each is refused with `_refusal`.
    """

    FAILURE: ClassVar[str]

    def __init__(self, name: str) -> None:
        self._refusal: ServingError | None = None
        self._report: Callable[[EngineStatus], None] | None = None
        self._reported_s = 0.0
        self._on_broken: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start answering calls."""
        self._thread.start()

    def preparation(self, request: Request) -> Callable[[], None] | None:
        """Return None: no call needs work before `submit`."""
        return None

    def watch(self, report: Callable[[EngineStatus], None]) -> None:
        """Call `report` with the engine's status every REPORT_S, on the engine's thread; it must not raise."""
        self._report = report

    def on_broken(self, end: Callable[[], None]) -> None:
        """Call `end`, at least once, after the engine stopped on an internal error and every call was answered.

        The engine then refuses every call, so its process should end and be restarted.
        """
        self._on_broken = end
        if isinstance(self._refusal, EngineLost):
            end()

    @abstractmethod
    def status(self) -> EngineStatus:
        """Return the engine's status; its numbers are consistent with one another on the engine's thread only."""

    @abstractmethod
    def _answer_calls(self) -> None:
        """Answer calls until the client is closed; raises when the engine can answer no more."""

    @abstractmethod
    def _refuse_all(self, refusal: ServingError) -> None:
        """Set `_refusal`, and refuse the calls that have not been answered."""

    def _run(self) -> None:
        try:
            self._answer_calls()
        except Exception:
            log.exception(self.FAILURE)
            self._refuse_all(EngineLost(BROKEN))
            self._on_broken()
        else:
            self._refuse_all(Draining(SHUTTING_DOWN))

    def _report_status(self) -> None:
        now_s = time.monotonic()
        if self._report and now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            self._report(self.status())
