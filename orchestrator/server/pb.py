"""Converts between Triton's Python objects and numpy; the only module that imports `triton_python_backend_utils`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator.core.arrays import Incoming, Tensors
from orchestrator.core.deployment.config import ENGINE_KEY
from orchestrator.core.deployment.stubs import Stubs, is_alive
from orchestrator.core.errors import (
    ClientDisconnected,
    EngineError,
    EngineLost,
    RequestError,
    Unavailable,
    error_from,
    first_line,
)
from orchestrator.core.messages.codec import (
    Answer,
    Call,
    Decoded,
    decode_answer,
    decode_call,
    encode_answer,
    encode_call,
)
from orchestrator.core.worker_pool import NO_THREAD, Busy, Late, WorkerPool

#: The one input and the one output of our engines.
MESSAGE = "message"
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

_CALLS: WorkerPool[Any] = WorkerPool("model-call")
_STUBS = Stubs()
_KEY = os.environ.get(ENGINE_KEY, "")


def tensors_of(request: Any) -> Tensors:
    """Return a request's inputs; they outlive the request."""
    return _arrays(request.inputs())


def has_input(request: Any, name: str) -> bool:
    """Return whether a request brings an input."""
    return any(tensor.name() == name for tensor in request.inputs())


def _arrays(tensors: Iterable[Any]) -> Tensors:
    """Return Triton's tensors as arrays, by name.

    No copy is needed: `as_numpy` returns an array that owns its memory. The Python backend builds it with pybind11's
    `py::array(dtype, dims, pointer)`, which copies when no base object keeps the pointer alive (pb_tensor.cc). Only
    DLPack would share the memory with Triton.
    """
    return {tensor.name(): tensor.as_numpy() for tensor in tensors}


def parameters_of(request: Any) -> str:
    """Return a request's parameters as JSON; raises RequestError when they are not text."""
    try:
        return str(request.parameters())
    except UnicodeDecodeError as error:
        raise RequestError(f"request parameters must be UTF-8, byte {error.start} of their JSON is not") from None


def _pb_tensors(tensors: Incoming) -> list[Any]:
    return [pb_utils.Tensor(name, np.ascontiguousarray(a)) for name, a in tensors.items()]


def send(sender: Any, tensors: Incoming, final: bool) -> None:
    """Send one response, with the FINAL flag in the same send if `final`."""
    response = pb_utils.InferenceResponse(output_tensors=_pb_tensors(tensors))
    sender.send(response, flags=FINAL if final else 0)


def send_final(sender: Any) -> None:
    """Send the empty FINAL flag."""
    sender.send(flags=FINAL)


def send_error(sender: Any, message: str, error: Exception) -> None:
    """Send an error response with its FINAL flag; Triton's code follows from the kind of the error."""
    code = pb_utils.TritonError.INTERNAL
    if isinstance(error, RequestError):
        code = pb_utils.TritonError.INVALID_ARG
    elif isinstance(error, Unavailable):
        code = pb_utils.TritonError.UNAVAILABLE
    response = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))
    sender.send(response, flags=FINAL)


def lost_check(model: str) -> Callable[[], bool]:
    """Return a function that tells whether the process that takes a Triton model's calls now has died since.

    Triton does not answer the calls that a process had taken when it died: `execute` had returned, so nothing waits
    for the process any more (seen with 2.51).
    """
    process = _STUBS.process_of(model)
    return lambda: process is not None and not is_alive(process)


def call_of(request: Any) -> Call:
    """Return a call to one of our engines, whose invariants are not checked yet.

    Raises EngineError if it is malformed or lacks the key that only this server's processes have: Triton lets every
    client call every model.
    """
    return decode_call(tensors_of(request)[MESSAGE], _KEY)


def answer(sender: Any, answer: Answer) -> None:
    """Answer a call to one of our engines, with the FINAL flag."""
    send(sender, {MESSAGE: encode_answer(answer)}, final=True)


def execute(model: str, call: Call, kind: type[Decoded]) -> Decoded:
    """Call one of our engines and return its answer, which has this kind; raises the error that it answers with.

    May never return, so it belongs on a thread that can be abandoned. Raises EngineLost if the model cannot be called.
    Blocking on purpose: async calls have a use-after-free before mid-2026 (python_backend#439).
    """
    response = _execute(model, {MESSAGE: encode_call(call, _KEY)}, (MESSAGE,))
    if response.has_error():
        raise error_from(response.error().message())
    tensors = _arrays(response.output_tensors())
    if MESSAGE not in tensors:
        raise EngineError(f"Triton model {model!r} answered without a message")
    return decode_answer(tensors[MESSAGE], kind)


def call(
    model: str,
    call: Call,
    kind: type[Decoded],
    limit_s: float,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> Decoded:
    """Call one of our engines as `execute` does, on a thread that can be abandoned.

    Also raises EngineLost if the model's process died or did not answer within `limit_s`, and ClientDisconnected if
    `is_unwanted`, which is asked while the call waits, says that nobody needs the answer.
    """
    found: Decoded = _run(model, partial(execute, model, call, kind), limit_s, is_unwanted)
    return found


def call_foreign(model: str, tensors: Incoming, outputs: Sequence[str], request_id: str, limit_s: float) -> Tensors:
    """Call a Triton model that is not ours and return its one response; raises EngineError, or as `call` does."""
    response = _run(model, partial(_execute, model, tensors, outputs, request_id), limit_s)
    if response.has_error():
        raise EngineError(f"Triton model {model!r} failed: {first_line(response.error().message() or 'no reason')}")
    return _arrays(response.output_tensors())


def _run(
    model: str, function: Callable[[], Any], limit_s: float, is_unwanted: Callable[[], bool] = lambda: False
) -> Any:
    is_lost = lost_check(model)
    try:
        return _CALLS.run(function, limit_s, lambda: is_lost() or is_unwanted())
    except Busy:
        raise Unavailable(NO_THREAD) from None
    except Late:
        if is_unwanted():
            raise ClientDisconnected("the client has gone") from None
        raise EngineLost(f"the process of Triton model {model!r} has died, or does not answer") from None


def _execute(model: str, tensors: Incoming, outputs: Sequence[str], request_id: str = "") -> Any:
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(outputs), inputs=_pb_tensors(tensors), request_id=request_id
    )
    try:
        return request.exec()
    except pb_utils.TritonModelException as error:
        raise EngineLost(f"Triton model {model!r} cannot be called: {error}") from None


def metric_family(name: str, kind: str, description: str) -> Any:
    """Create a family of series on the metrics port; kind: gauge or counter."""
    kinds = pb_utils.MetricFamily
    return _kept_alive(kinds(name=name, description=description, kind=getattr(kinds, kind.upper())))


def metric(family: Any, labels: dict[str, str]) -> Any:
    """Create a series of a family."""
    return _kept_alive(family.Metric(labels=labels))


def _kept_alive(metric: Any) -> Any:
    """Keep a metric from being destroyed at exit, when it would read shared memory that Triton has freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(metric))
    return metric
