"""Packs and unpacks the flat numpy tensors and the error texts that pass between our Triton models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.core.arrays import Features
from orchestrator.core.errors import (
    Draining,
    EngineError,
    EngineLost,
    RequestError,
    ServingError,
    Unavailable,
    UnknownSequence,
)
from orchestrator.core.types import MAX_FEATURE_ROWS

Tensors = dict[str, npt.NDArray[Any]]
Incoming = Mapping[str, npt.NDArray[Any]]

#: One more than the largest token id that an INT32 can hold; the largest UINT64.
MAX_VOCAB_SIZE, MAX_SCALAR = 1 << 31, (1 << 64) - 1

# Triton carries an error only as text, whose first word is this code. Subclasses come before their base class.
_ERROR_CODES: dict[str, type[ServingError]] = {
    "unknown_sequence": UnknownSequence,
    "draining": Draining,
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


def packed_us(time_us: float) -> int:
    """Return a time in µs, cut to what an INT32 can hold, 35 minutes: a step may wait longer than that for blocks."""
    return min(int(time_us), int(np.iinfo(np.int32).max))


def pack_nonzero(**values: int) -> Tensors:
    """Pack each integer as INT32[1] under its name; zeros are omitted."""
    return pack_scalars(**{name: value for name, value in values.items() if value})


def text(tensors: Incoming, name: str) -> str:
    """Return a text, or "" if it was omitted; raise EngineError unless it is one text in UTF-8."""
    if name not in tensors:
        return ""
    values = tensors[name].reshape(-1).tolist()
    if len(values) != 1 or not isinstance(values[0], bytes):
        raise EngineError(f"tensor {name!r} must be one text, got {_described(tensors[name])} in an engine call")
    try:
        return values[0].decode()
    except UnicodeDecodeError:
        raise EngineError(f"tensor {name!r} is not UTF-8 in an engine call") from None


def scalar(tensors: Incoming, name: str, default: int | None = None) -> int:
    """Return an integer of at least 0, or the default if it was omitted; raise EngineError as `bounded` does."""
    return bounded(tensors, name, MAX_SCALAR, default)


def bounded(tensors: Incoming, name: str, highest: int, default: int | None = None) -> int:
    """Return an integer, or the default if it was omitted.

    Raises EngineError if it was omitted and there is no default, or if it is not one integer in 0..highest.
    """
    found = tensors.get(name)
    if found is None or not found.size:
        if default is None:
            raise EngineError(f"tensor {name!r} is missing from an engine call")
        return default
    if found.dtype.kind not in "iu" or found.size > 1:
        raise EngineError(f"tensor {name!r} must be one integer, got {_described(found)} in an engine call")
    value = int(found.reshape(-1)[0])
    if not 0 <= value <= highest:
        raise EngineError(f"{name} must be in 0..{highest}, got {value} in an engine call")
    return value


def ids(tensors: Incoming, name: str) -> npt.NDArray[np.int32]:
    """Return (n,) int32, empty if the tensor was omitted; raise EngineError for another dtype."""
    return _typed(tensors, name, np.int32)


def tokens(tensors: Incoming, name: str, vocab_size: int = MAX_VOCAB_SIZE) -> list[int]:
    """Return token ids, empty if the tensor was omitted; raise EngineError for an id outside the vocabulary."""
    found: list[int] = ids(tensors, name).tolist()
    if found and not (min(found) >= 0 and max(found) < vocab_size):
        raise EngineError(f"{name} has an id outside 0..{vocab_size - 1} in an engine call")
    return found


def numbers(tensors: Incoming, name: str) -> npt.NDArray[np.float32]:
    """Return (n,) float32, empty if the tensor was omitted; raise EngineError for another dtype."""
    return _typed(tensors, name, np.float32)


def table(tensors: Incoming, name: str, dtype: npt.DTypeLike, ndim: int, num_rows: int) -> npt.NDArray[Any] | None:
    """Return a tensor of `num_rows` rows, or None if it was omitted; raise EngineError for another shape or dtype."""
    found = tensors.get(name)
    if found is None:
        return None
    if found.dtype != dtype or found.ndim != ndim or len(found) != num_rows:
        raise EngineError(
            f"tensor {name!r} must have {num_rows} rows, {ndim} dimensions and the dtype {np.dtype(dtype)}, "
            f"got {_described(found)} in an engine call"
        )
    return found


def _typed(tensors: Incoming, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    found = tensors.get(name)
    if found is None:
        return np.empty(0, dtype)
    if found.dtype != dtype:
        raise EngineError(f"tensor {name!r} must be {np.dtype(dtype)}, got {_described(found)} in an engine call")
    return found.reshape(-1)


def _described(found: npt.NDArray[Any]) -> str:
    return f"shape {found.shape} {'text' if found.dtype == object else found.dtype}"


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


def unpack_features(tensors: Incoming) -> Features | None:
    """Return the target's hidden states, (rows, width) float32, or None if they were omitted.

    Raises EngineError for another shape or dtype.
    """
    features = tensors.get("features")
    if features is not None and (features.ndim != 2 or features.dtype != np.float32):
        raise EngineError(f"features must be (rows, width) float32, got {features.shape} {features.dtype}")
    if features is not None and len(features) > MAX_FEATURE_ROWS:
        raise EngineError(f"features must have at most {MAX_FEATURE_ROWS} rows, got {len(features)}")
    return features
