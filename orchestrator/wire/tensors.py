"""Packs and unpacks the flat numpy tensors and the error texts that pass between our Triton models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.core.errors import EngineError, EngineLost, RequestError, ServingError, Unavailable, UnknownSequence

Tensors = dict[str, npt.NDArray[Any]]
Incoming = Mapping[str, npt.NDArray[Any]]

# Triton carries an error as text only, whose first word is this code. Subclasses come before their base class.
_ERROR_CODES: dict[str, type[ServingError]] = {
    "unknown_sequence": UnknownSequence,
    "unavailable": Unavailable,
    "request": RequestError,
    "lost": EngineLost,
    "engine": EngineError,
}


def pack_text(name: str, text: str) -> Tensors:
    """Pack a text as STRING[1]; an empty text is omitted."""
    return {name: np.array([text.encode()], np.object_)} if text else {}


def pack_ids(name: str, ids: Sequence[int] | npt.NDArray[np.int32]) -> Tensors:
    """Pack a list of integers as INT32[n]; an empty list is omitted."""
    return {name: np.array(ids, np.int32)} if len(ids) else {}


def pack_scalars(**values: int) -> Tensors:
    """Pack each integer as INT32[1] under its name."""
    return {name: np.array([value], np.int32) for name, value in values.items()}


def pack_nonzero(**values: int) -> Tensors:
    """Pack each integer as INT32[1] under its name; zeros are omitted."""
    return pack_scalars(**{name: value for name, value in values.items() if value})


def text(tensors: Incoming, name: str) -> str:
    """Return a text, or "" if it was omitted."""
    value: str = tensors[name].reshape(-1)[0].decode() if name in tensors else ""
    return value


def scalar(tensors: Incoming, name: str, default: int | None = None) -> int:
    """Return an integer, or the default if it was omitted; raise EngineError if there is no default."""
    if name in tensors and tensors[name].size:
        return int(tensors[name].reshape(-1)[0])
    if default is None:
        raise EngineError(f"tensor {name!r} is missing from an engine call")
    return default


def bounded(tensors: Incoming, name: str, highest: int, default: int | None = None) -> int:
    """Return an integer as `scalar` does; raise EngineError if it is outside 0..highest."""
    value = scalar(tensors, name, default)
    if not 0 <= value <= highest:
        raise EngineError(f"{name} must be in 0..{highest}, got {value} in an engine call")
    return value


def ids(tensors: Incoming, name: str) -> npt.NDArray[np.int32]:
    """Return (n,) int32, empty if the tensor was omitted."""
    return tensors.get(name, np.empty(0, np.int32)).reshape(-1).astype(np.int32, copy=False)


def numbers(tensors: Incoming, name: str) -> npt.NDArray[np.float32]:
    """Return (n,) float32, empty if the tensor was omitted."""
    return tensors.get(name, np.empty(0, np.float32)).reshape(-1).astype(np.float32, copy=False)


def split(values: Sequence[Any] | npt.NDArray[Any], lengths: Sequence[int], name: str) -> list[Any]:
    """Split a flat sequence into consecutive parts of these lengths; raise EngineError if they do not add up."""
    if min(lengths, default=0) < 0 or sum(lengths) != len(values):
        raise EngineError(f"{name}: lengths add up to {sum(lengths)}, but there are {len(values)} values")
    ends = np.cumsum([0, *lengths]).tolist()
    return [values[start:stop] for start, stop in pairwise(ends)]


def error_text(error: ServingError) -> str:
    """Return the text that carries an error over Triton: its code, then its message."""
    code = next((code for code, kind in _ERROR_CODES.items() if isinstance(error, kind)), "engine")
    return f"{code}: {error}"


def error_from(text: str) -> ServingError:
    """Return the error that a text carries; a text without a code is Triton's own, so the engine was not reached."""
    code, _, message = text.partition(": ")
    kind = _ERROR_CODES.get(code)
    return kind(message) if kind else EngineLost(text)
