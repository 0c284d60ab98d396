"""The calls of our engines and their answers as MessagePack: the one tensor that crosses Triton (docs/wire.md).

Four calls: `verify` (a step with the caller's tree, or the start of a sequence whose proposer is beside the engine),
`take`, `draft` and `release`. Types are checked while a message is decoded, invariants by `messages/checks.py`.
"""

from __future__ import annotations

import hmac
from dataclasses import replace
from math import prod
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from orchestrator.core.errors import EngineError, abbreviated
from orchestrator.core.messages.context import Release
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.run import TakeSteps
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.proposal import Step
from orchestrator.core.types import Acceptance, DraftResponse

#: (n,) uint8
Message = npt.NDArray[np.uint8]
Call = StepRequest | TakeSteps | DraftRequest | Release
Answer = Acceptance | list[Step] | DraftResponse | None
Decoded = TypeVar("Decoded")

_KINDS: dict[str, type[Call]] = {"verify": StepRequest, "take": TakeSteps, "draft": DraftRequest, "release": Release}
_KIND_OF = {kind: name for name, kind in _KINDS.items()}
#: In the order of their MessagePack extension codes.
_DTYPES = [np.dtype(name) for name in ("bool", "int32", "float32", "float64")]
_MAX_DIMENSIONS = 2


class _Envelope(msgspec.Struct, array_like=True):
    """key: the secret that only this server's processes have. kind: a key of _KINDS."""

    key: str
    kind: str
    body: msgspec.Raw


def encode_call(call: Call, key: str) -> Message:
    """Return the message of a call; key: the secret of this server's processes."""
    return packed(_Envelope(key, _KIND_OF[type(call)], msgspec.Raw(_ENCODER.encode(call))))


def decode_call(message: Message, key: str) -> Call:
    """Return the call of a message; raises EngineError if it is malformed or lacks the key."""
    envelope = _decoded(_ENVELOPE, _bytes(message))
    if not hmac.compare_digest(envelope.key.encode(), key.encode()):
        raise EngineError("only the server itself may call this model; clients call the model speculative")
    if envelope.kind not in _KINDS:
        raise EngineError(f"unknown engine call {abbreviated(envelope.kind)} (allowed: {', '.join(_KINDS)})")
    call: Call = _decoded(_CALLS[envelope.kind], envelope.body)
    return call


def encode_answer(answer: Answer) -> Message:
    """Return the message of an answer; None answers a release."""
    return packed(_sent(answer))


def decode_answer(message: Message, kind: type[Decoded]) -> Decoded:
    """Return the answer of a message, of the kind that the call has; raises EngineError if it is malformed."""
    found: Decoded = _decoded(msgspec.msgpack.Decoder(kind, dec_hook=_array_of), _bytes(message))
    return found


def packed(value: Any) -> Message:
    """Return any value as a message."""
    return np.frombuffer(_ENCODER.encode(value), np.uint8)


def _bytes(message: Message) -> memoryview:
    if message.dtype != np.uint8 or message.ndim != 1:
        raise EngineError(f"a message must be (n,) uint8, got {message.shape} {message.dtype}")
    return np.ascontiguousarray(message).data


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: Any) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"a message is malformed: {abbreviated(str(error))}") from None


def _sent(answer: Answer) -> Answer:
    """Return an answer without the load of its pass, which stays in the engine's process."""
    if isinstance(answer, list):
        return [step._replace(acceptance=replace(step.acceptance, load=None)) for step in answer]
    return replace(answer, load=None) if isinstance(answer, Acceptance) else answer


def _extension(value: Any) -> Any:
    """Return an array as an extension: its number of dimensions, its shape and its values in C order."""
    if isinstance(value, np.ndarray) and value.dtype in _DTYPES:
        shape = np.array([value.ndim, *value.shape], np.int32)
        return msgspec.msgpack.Ext(_DTYPES.index(value.dtype), shape.tobytes() + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot cross Triton")


def _array_of(annotation: Any, value: Any) -> npt.NDArray[Any]:
    """Return the array of an extension; raises ValidationError unless it has the annotation's dtype."""
    dtype = np.dtype(get_args(get_args(annotation)[1])[0])
    if not isinstance(value, msgspec.msgpack.Ext) or not 0 <= value.code < len(_DTYPES) or _DTYPES[value.code] != dtype:
        raise msgspec.ValidationError(f"expected an array of {dtype}")
    data = bytes(value.data)
    header = np.frombuffer(data, np.int32, min(len(data) // 4, 1 + _MAX_DIMENSIONS)).tolist()
    num_dimensions = header[0] if header else -1
    start, shape = 4 * (1 + num_dimensions), header[1 : 1 + num_dimensions]
    if not 0 <= num_dimensions < len(header) or min(shape, default=0) < 0:
        raise msgspec.ValidationError("an array's shape is malformed")
    if len(data) - start != prod(shape) * dtype.itemsize:
        raise msgspec.ValidationError(f"an array of {len(data)} bytes cannot have the shape {shape}")
    array: npt.NDArray[Any] = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return array.copy()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_extension)
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_CALLS = {name: msgspec.msgpack.Decoder(kind, dec_hook=_array_of) for name, kind in _KINDS.items()}
