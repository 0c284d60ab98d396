"""Reading and writing the flat numpy tensors in which our Triton models speak to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.core.errors import EngineError

Tensors = dict[str, npt.NDArray[Any]]
Incoming = Mapping[str, npt.NDArray[Any]]

_NO_IDS = np.empty(0, np.int32)
_NO_NUMBERS = np.empty(0, np.float32)


def pack_text(name: str, text: str) -> Tensors:
    """Pack a text; an empty one is omitted."""
    return {name: np.array([text.encode()], np.object_)} if text else {}


def pack_ids(name: str, ids: Sequence[int] | npt.NDArray[np.int32]) -> Tensors:
    """Pack whole numbers; none are omitted."""
    return {name: np.array(ids, np.int32)} if len(ids) else {}


def text(tensors: Incoming, name: str) -> str:
    """Return a text, empty when it was omitted."""
    value: str = tensors[name].reshape(-1)[0].decode() if name in tensors else ""
    return value


def scalar(tensors: Incoming, name: str, default: int | None = None) -> int:
    """Return a whole number; raises EngineError when it is missing and has no default."""
    if name in tensors and tensors[name].size:
        return int(tensors[name].reshape(-1)[0])
    if default is None:
        raise EngineError(f"tensor {name!r} is missing from an engine call")
    return default


def bounded(tensors: Incoming, name: str, highest: int, default: int | None = None) -> int:
    """Return a whole number in 0..highest; raises EngineError when it is missing without a default, or outside."""
    value = scalar(tensors, name, default)
    if not 0 <= value <= highest:
        raise EngineError(f"{name} must be in 0..{highest}, got {value} in an engine call")
    return value


def ids(tensors: Incoming, name: str) -> npt.NDArray[np.int32]:
    """Return (n,) int32, empty when it was omitted."""
    return tensors.get(name, _NO_IDS).reshape(-1).astype(np.int32, copy=False)


def numbers(tensors: Incoming, name: str) -> npt.NDArray[np.float32]:
    """Return (n,) float32, empty when it was omitted."""
    return tensors.get(name, _NO_NUMBERS).reshape(-1).astype(np.float32, copy=False)


def runs(values: Sequence[Any] | npt.NDArray[Any], lengths: Sequence[int], what: str) -> list[Any]:
    """Cut a flat sequence into runs of these lengths; raises EngineError when they do not fit."""
    if min(lengths, default=0) < 0 or sum(lengths) != len(values):
        raise EngineError(f"{what}: lengths add up to {sum(lengths)}, but there are {len(values)} values")
    ends = np.cumsum([0, *lengths]).tolist()
    return [values[start:stop] for start, stop in pairwise(ends)]
