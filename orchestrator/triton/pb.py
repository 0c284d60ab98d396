"""Between Triton's Python objects and numpy: the only module that imports `triton_python_backend_utils`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from orchestrator.core.errors import EngineError, EngineLost, RequestError, Unavailable, first_line
from orchestrator.triton.callers import Callers
from orchestrator.triton.stubs import Stubs, now_s
from orchestrator.wire.tensors import Tensors, error_from

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

_CALLERS: Callers[Any] = Callers()
_STUBS = Stubs()


def tensors_of(request: Any) -> Tensors:
    """Copy a request's inputs out of shared memory, so that they outlive the request."""
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}


def parameters_of(request: Any) -> str:
    """Return a request's parameters as JSON; raises RequestError when they are no text."""
    try:
        return str(request.parameters())
    except UnicodeDecodeError as error:
        raise RequestError(f"request parameters must be UTF-8, byte {error.start} of their JSON is not") from None


def _pb_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    return [pb_utils.Tensor(name, np.ascontiguousarray(a)) for name, a in tensors.items()]


def send(sender: Any, tensors: Mapping[str, npt.NDArray[Any]], final: bool) -> None:
    """Send one response; with `final`, its FINAL flag in the same send."""
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


def call(
    model: str, tensors: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str], limit_s: float = math.inf
) -> Tensors:
    """Call another Triton model and wait for its one answer; raises the error that it answers.

    Raises EngineLost when the model's process has died, or has not answered within `limit_s`.
    Blocking on purpose: async calls have a use-after-free before mid-2026 (python_backend#439).
    """
    response = _run(model, tensors, outputs, limit_s, lambda request: request.exec())
    if response.has_error():
        raise error_from(response.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def responses(
    model: str,
    tensors: Mapping[str, npt.NDArray[Any]],
    outputs: Sequence[str],
    limit_s: float,
    request_id: str,
    decoupled: bool,
) -> list[Tensors]:
    """Call a Triton model that is none of ours, and wait for all its responses; errors as in `call`.

    decoupled: whether the model is; a call of the other kind is refused by Triton.
    """

    def exchange(request: Any) -> list[Any]:
        return list(request.exec(decoupled=True)) if decoupled else [request.exec()]

    found = _run(model, tensors, outputs, limit_s, exchange, request_id)
    for response in found:
        if response.has_error():
            raise EngineError(f"Triton model {model!r} failed: {first_line(response.error().message() or 'no reason')}")
    return [{tensor.name(): np.array(tensor.as_numpy()) for tensor in each.output_tensors()} for each in found]


def _run(
    model: str,
    tensors: Mapping[str, npt.NDArray[Any]],
    outputs: Sequence[str],
    limit_s: float,
    exchange: Callable[[Any], Any],
    request_id: str = "",
) -> Any:
    """Return what `exchange` makes of the request, on a thread that can be left behind."""
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(outputs), inputs=_pb_tensors(tensors), request_id=request_id
    )
    _STUBS.note(model)
    began_s = now_s()

    def is_lost() -> bool:
        return now_s() - began_s > limit_s or _STUBS.is_gone(model, began_s)

    try:
        return _CALLERS.run(lambda: exchange(request), is_lost)
    except pb_utils.TritonModelException as error:
        raise EngineLost(f"Triton model {model!r} cannot be called: {error}") from None


def metric_family(name: str, kind: str, description: str) -> Any:
    """Return a family of series on the metrics port; kind: gauge or counter."""
    return pb_utils.MetricFamily(name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind.upper()))
