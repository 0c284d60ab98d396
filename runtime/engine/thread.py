"""The engine thread: it collects calls as long as the batching policy waits, runs passes, and answers every call."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from orchestrator.core.errors import ServingError, Unavailable
from orchestrator.core.types import EngineStatus
from runtime.engine.batching import BatchingPolicy
from runtime.engine.calls import Engine, EngineCall, Reply, Request, submit_and_wait
from runtime.engine.client_thread import ClientThread
from runtime.engine.passes import Passes


class EngineThread(ClientThread[Request]):
    """Runs an engine's passes over all waiting calls, on one thread, from `start` to `close`.

    prepare: called on the thread before its first pass.
    Invariant: every submitted call is answered exactly once, at the latest one pass after its deadline.
    """

    FAILURE = "the engine stops: its state is inconsistent after an internal error"

    def __init__(self, engine: Engine[Request], name: str, prepare: Callable[[], None] = lambda: None) -> None:
        super().__init__(name)
        self.batching = BatchingPolicy()
        self._engine: Engine[Request] = engine
        self._passes: Passes[Request] = Passes(engine)
        self._prepare = prepare
        # Calls, ids of sequences that have ended, and None to stop.
        self._inbox: queue.SimpleQueue[EngineCall[Request] | int | None] = queue.SimpleQueue()
        # Guards the inbox: a call enters it before the thread empties it for the last time, or is refused; and
        # progress.num_waiting includes the number of its items.
        self._lock = threading.Lock()
        self._calls: list[EngineCall[Request]] = []
        self._after_pass: Callable[[], None] = lambda: None

    @property
    def kernels(self) -> str:
        """What computes the engine's passes: torch or native."""
        return self._engine.kernels

    @property
    def num_passes(self) -> int:
        """Number of passes so far."""
        return self._passes.progress.num_passes

    @property
    def num_calls(self) -> int:
        """Number of calls in these passes."""
        return self._passes.progress.num_calls

    def warm_up(self, calls: Sequence[Request]) -> None:
        """Start, answer calls one after another, and release their sequences."""
        self.start()
        for request in calls:
            submit_and_wait(self.submit, request)
        for sequence_id in {request.delta.sequence_id for request in calls}:
            self.release(sequence_id)

    def submit(self, request: Request, deadline_s: float, on_answer: Reply) -> None:
        """Queue a call; `on_answer` is called once, on the engine's thread (after `close`, on the caller's).

        deadline_s: latest time of the answer, by time.monotonic().
        """
        call = EngineCall(request, deadline_s, on_answer)
        with self._lock:
            if self._refusal is None:
                self._put(call)
                return
        call.reply(self._refusal)

    def release(self, sequence_id: int) -> None:
        """Queue the end of a sequence."""
        with self._lock:
            self._put(sequence_id)

    def after_pass(self, action: Callable[[], None]) -> None:
        """Call `action` on the engine's thread after each pass, once its calls are answered; it must not raise."""
        self._after_pass = action

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current pass; queued calls are answered with Unavailable."""
        with self._lock:
            self._put(None)
        self._thread.join(timeout_s)

    def status(self) -> EngineStatus:
        """Return the engine's status; its numbers are consistent with one another on the engine's thread only."""
        return self._passes.status()

    def _put(self, item: EngineCall[Request] | int | None) -> None:
        """Put an item into the inbox. Caller holds the lock."""
        self._inbox.put(item)
        self._passes.progress.add_waiting(1)

    def _answer_calls(self) -> None:
        self._prepare()
        while self._receive():
            self._drop_late_and_idle()
            self._report_status()
            if self._calls:
                self._pass()
                self._after_pass()

    def _refuse_all(self, refusal: ServingError) -> None:
        """Refuse the waiting calls and all later ones."""
        with self._lock:
            self._refusal = refusal
        for call in self._calls:
            if not call.answered:
                call.reply(refusal)
        while not self._inbox.empty():
            if isinstance(item := self._inbox.get(), EngineCall):
                item.reply(refusal)

    def _receive(self) -> bool:
        """Take the calls that have arrived, and wait for those that the policy expects; return False after `close`."""
        while True:
            oldest_call_s = min((call.arrived_s for call in self._calls), default=None)
            wait_s = self.batching.wait_s(time.monotonic(), oldest_call_s)
            try:
                item = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            except queue.Empty:
                return True
            self._passes.progress.add_waiting(-1)
            if item is None:
                return False
            self._take(item)

    def _take(self, item: EngineCall[Request] | int) -> None:
        if isinstance(item, int):
            self._drop(item, "the sequence was released")
        elif any(call.sequence_id == item.sequence_id for call in self._calls):
            item.reply(Unavailable(f"sequence {item.sequence_id} has a call under way"))
        else:
            self.batching.arrived(item.sequence_id, item.arrived_s)
            self._calls.append(item)

    def _drop(self, sequence_id: int, reason: str) -> None:
        """Give back a sequence's blocks, and refuse its call if there is one."""
        self.batching.left(sequence_id)
        self._engine.sequences.drop(sequence_id)
        for call in self._calls:
            if call.sequence_id == sequence_id:
                call.reply(Unavailable(reason))
        self._calls = [call for call in self._calls if not call.answered]

    def _drop_late_and_idle(self) -> None:
        now_s = time.monotonic()
        for call in self._calls:
            if call.is_late(now_s):
                self._drop(call.sequence_id, "the deadline passed before the engine could answer")
        self.batching.forget_idle(now_s)
        self._engine.sequences.drop_idle(now_s, {call.sequence_id for call in self._calls})

    def _pass(self) -> None:
        began_s, calls, before = time.monotonic(), self._calls, self.num_passes
        self._calls = self._passes.run(calls)
        now_s = time.monotonic()
        waiting = {call.sequence_id for call in self._calls}
        answered = [call.sequence_id for call in calls if call.sequence_id not in waiting]
        num_run = self.num_passes - before
        # If nothing was computed, nothing is learnt about the cost of a pass.
        pass_s = (now_s - began_s) / num_run if num_run else self.batching.pass_s
        self.batching.answered(answered, now_s, pass_s)
