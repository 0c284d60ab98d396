"""NVIDIA's Triton backend as a client's transport: each request is a blocking BLS call on a thread of its own.

Independent of Triton: the function that calls the model is passed in. The backend forms its own batches.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from orchestrator.core.arrays import Tensors
from orchestrator.core.worker_pool import WorkerPool
from runtime.engine.build_engines import ModelCall
from runtime.engine.client_thread import SHUTTING_DOWN
from runtime.trtllm.backend.tensors import OUTPUTS, stop_tensors
from runtime.trtllm.transport import Response, ResponseQueue, wrap_error

log = logging.getLogger(__name__)

#: How long a call that stops a request may take; nothing waits for it.
STOP_LIMIT_S = 5.0
#: How much longer than its request a call may take, so that the client notices the deadline before the call fails.
GRACE_S = 0.25


@dataclass(frozen=True, eq=False)
class ModelInput:
    """The tensors of one call to the Triton model, and the names of the outputs to request."""

    tensors: Tensors
    outputs: tuple[str, ...] = OUTPUTS


class BackendTransport:
    """Implements `runtime.trtllm.transport.Transport`; a result is the response's tensors."""

    # Triton manages the process that holds the engine.
    owns_engine = False

    def __init__(self, call: ModelCall, num_threads: int, name: str) -> None:
        """num_threads: the most calls at once; more calls wait."""
        self._call = call
        # Daemon threads: a backend that hangs must not keep the process from exiting.
        self._calls: WorkerPool[None] = WorkerPool(name, num_threads)
        self._stops: WorkerPool[None] = WorkerPool(f"{name}-stops", 1)
        self._responses = ResponseQueue()
        self.responses = self._responses.take
        self._has_begun: dict[int, bool] = {}
        self._lock = threading.Lock()

    def enqueue(self, payload: ModelInput, deadline_s: float) -> int:
        """Have a thread make the call as soon as one is free."""
        request_id = secrets.randbits(62) + 1
        with self._lock:
            self._has_begun[request_id] = False
        call = self._calls.start(partial(self._run, request_id, payload, deadline_s))
        call.future.add_done_callback(partial(self._answer_refusal, request_id))
        return request_id

    def takes_requests(self) -> bool:
        """Return True: if the backend is gone, each call fails with an error."""
        return True

    def cancel(self, request_id: int) -> None:
        """Skip a call that waits for a thread; stop one that has begun."""
        with self._lock:
            has_begun = self._has_begun.pop(request_id, False)
        if has_begun:
            self._stops.start(partial(self._stop, request_id))

    def shut_down(self) -> None:
        """Begin no more calls."""
        self._calls.close(SHUTTING_DOWN)
        self._stops.close(SHUTTING_DOWN)

    def _run(self, request_id: int, payload: ModelInput, deadline_s: float) -> None:
        with self._lock:
            if request_id not in self._has_begun:
                return
            self._has_begun[request_id] = True
        limit_s = max(deadline_s - time.monotonic(), 0.0) + GRACE_S
        try:
            response = Response(request_id, self._call(payload.tensors, payload.outputs, str(request_id), limit_s))
        except Exception as error:
            response = Response(request_id, error=wrap_error("the backend's answer was not understood", error))
        with self._lock:
            self._has_begun.pop(request_id, None)
        self._responses.put(response)

    def _answer_refusal(self, request_id: int, future: Future[None]) -> None:
        """Answer a request whose call was not made, because no thread could be started or the pool is closed."""
        error = future.exception()
        if isinstance(error, Exception):
            with self._lock:
                self._has_begun.pop(request_id, None)
            self._responses.put(Response(request_id, error=wrap_error("the backend was not called", error)))

    def _stop(self, request_id: int) -> None:
        try:
            self._call(stop_tensors(), OUTPUTS, str(request_id), STOP_LIMIT_S)
        except Exception as error:  # the request then runs to its full length
            log.warning("request %d of the backend could not be stopped: %s", request_id, error)
