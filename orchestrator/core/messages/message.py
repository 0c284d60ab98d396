"""The tensors of an engine call or its answer as one message, which is the only tensor that crosses Triton.

Triton and the Python backend handle each tensor separately in four places (about 20 µs a tensor, 20 tensors a step).
Layout: the length of the header, UINT32; the header, `name:dtype:shape;` for each tensor, padded with spaces; the
values of each tensor in C order. All values begin at multiples of 8. A text is its UTF-8 bytes with the dtype `text`.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.errors import EngineError, abbreviated
from orchestrator.core.messages.tensors import Incoming, Tensors

Message = npt.NDArray[np.uint8]

TEXT = "text"
DTYPES = {name: np.dtype(name) for name in ("bool", "int32", "uint64", "float32", "float64")}
_ALIGNMENT, _LENGTH_BYTES = 8, 4
#: Parsed headers are cached, so a peer must not decide how much memory they take.
MAX_HEADER_BYTES = 1 << 14
MAX_DIMENSIONS, MAX_LENGTH = 4, (1 << 31) - 1


class Field(NamedTuple):
    """Where a tensor is in a message. offset: bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_values(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return self.num_values * (1 if self.dtype == TEXT else DTYPES[self.dtype].itemsize)


def encode(tensors: Incoming) -> Message:
    """Return the message of these tensors, (n,) uint8; their dtypes are those of DTYPES, or object for STRING[1]."""
    header, values = [], []
    for name, array in tensors.items():
        if array.dtype == object:
            data: bytes = array.reshape(-1)[0]
            header.append(f"{name}:{TEXT}:{len(data)};")
        else:
            data = array.tobytes()
            header.append(f"{name}:{array.dtype}:{','.join(map(str, array.shape))};")
        values.append(data + bytes(-len(data) % _ALIGNMENT))
    head = "".join(header).encode()
    head += b" " * (-(_LENGTH_BYTES + len(head)) % _ALIGNMENT)
    return np.frombuffer(b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *values]), np.uint8)


def decode(message: Message) -> Tensors:
    """Return the tensors of a message, which share its memory; raise EngineError if it is cut short or malformed."""
    if message.dtype != np.uint8 or message.ndim != 1:
        raise EngineError(f"a message must be (n,) uint8, got {message.shape} {message.dtype}")
    data = np.ascontiguousarray(message).data
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if end > MAX_HEADER_BYTES:
        raise EngineError(f"a message has a header of {end} bytes, at most {MAX_HEADER_BYTES} allowed")
    fields, num_bytes = _fields(bytes(data[_LENGTH_BYTES:end]))
    if len(data) != end + num_bytes:
        raise EngineError(f"a message of {len(data)} bytes must have {end + num_bytes}")
    return {field.name: _value(field, data, end) for field in fields}


def _value(field: Field, data: memoryview, end: int) -> npt.NDArray[Any]:
    start = end + field.offset
    if field.dtype == TEXT:
        return np.array([bytes(data[start : start + field.num_bytes])], np.object_)
    return np.frombuffer(data, DTYPES[field.dtype], field.num_values, start).reshape(field.shape)


@lru_cache(maxsize=1024)
def _fields(header: bytes) -> tuple[list[Field], int]:
    """Return the fields that a header declares, and the total bytes of their values; most calls repeat a header."""
    fields: list[Field] = []
    offset = 0
    try:
        for line in header.decode().split(";")[:-1]:
            name, dtype, shape = line.split(":")
            field = Field(name, dtype, tuple(map(int, shape.split(","))) if shape else (), offset)
            if not all(0 <= length <= MAX_LENGTH for length in field.shape):
                raise ValueError(f"{name} has the shape {shape}")
            if len(field.shape) > MAX_DIMENSIONS:
                raise ValueError(f"{name} has {len(field.shape)} dimensions")
            fields.append(field)
            offset += field.num_bytes + -field.num_bytes % _ALIGNMENT
    except (KeyError, ValueError) as error:
        raise EngineError(f"a message has a malformed header: {abbreviated(str(error))}") from None
    return fields, offset
