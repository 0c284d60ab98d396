"""Runs and counts the passes of one engine; when a pass fails, only the call at fault is refused."""

from __future__ import annotations

import logging
import time
from typing import Generic

from torch import AcceleratorError

from orchestrator.core.errors import EngineError, ServingError
from orchestrator.core.types import EngineStatus
from runtime.engine.calls import Engine, EngineCall, Progress, Request

log = logging.getLogger(__name__)


class Passes(Generic[Request]):
    """Runs an engine's passes; one thread at a time may call.

    progress: passes so far and the calls in them, counted by the engine. pass_s: the time of all passes.
    """

    def __init__(self, engine: Engine[Request]) -> None:
        self.engine: Engine[Request] = engine
        self.progress = engine.progress = Progress()
        self.pass_s = 0.0

    def run(self, calls: list[EngineCall[Request]]) -> list[EngineCall[Request]]:
        """Run a pass over these calls, if any has something to compute; return those that need another one."""
        began_s, before = time.monotonic(), self.progress.num_passes
        waiting = self._advance(calls)
        if self.progress.num_passes > before:  # otherwise every call was refused, or waits for blocks
            self.pass_s += time.monotonic() - began_s
        return waiting

    def status(self) -> EngineStatus:
        """Return the engine's status."""
        sequences = self.engine.sequences
        pool = sequences.pool
        return EngineStatus(
            blocks_held=pool.num_held,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free,
            blocks_total=pool.num_blocks,
            num_sequences=len(sequences),
            num_passes=self.progress.num_passes,
            num_calls=self.progress.num_calls,
            pass_s=self.pass_s,
            num_preempted=sequences.num_preempted,
        )

    def _advance(self, calls: list[EngineCall[Request]]) -> list[EngineCall[Request]]:
        """Run a pass; if it fails, run each call alone, so that only the call at fault is refused.

        Raises AcceleratorError: once a kernel has failed, the GPU returns only errors to this process.
        """
        try:
            return self.engine.advance(calls)
        except AcceleratorError:
            raise
        except Exception as error:
            log.exception("a pass over %d requests failed", len(calls))
            if len(calls) == 1 and not calls[0].answer_finished():
                self._refuse(calls[0], error)
        unanswered = [call for call in calls if not call.answer_finished()]
        for call in unanswered:
            # The failed pass may have left the sequence half updated; opening it again restores it.
            call.sequence = None
        return [waiting for call in unanswered for waiting in self._advance([call])]

    def _refuse(self, call: EngineCall[Request], error: Exception) -> None:
        self.engine.sequences.drop(call.sequence_id)
        if not call.answered:
            unknown = EngineError("the engine failed on this request; the server's log has the cause")
            call.reply(error if isinstance(error, ServingError) else unknown)
