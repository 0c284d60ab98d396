"""The head of a GGUF file: its metadata, and where its tensors are; numbers and names alone, no weights are read.

Not gguf's own reader, which takes seconds for a vocabulary and would have to be in every process that encodes text.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from orchestrator.core.errors import ConfigError

MAGIC, VERSIONS = b"GGUF", (2, 3)
#: The types of single values by number, as struct writes them; a string and an array have types of their own.
_VALUES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: shape as torch writes it, the number of its type (ggml's), and its first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def num_values(self) -> int:
        """Values, whatever their type."""
        return prod(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """The head of a file. metadata: {key: value}; tensors: {name: where it is}."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of the metadata, whose type is checked; without a default, one that lacks is an error."""
        value = self.metadata.get(key, default)
        if kind is float and type(value) is int:
            value = float(value)
        if value is None and default is None:
            raise ConfigError(f"{self.path}: the file lacks the key {key}")
        if value is not default and type(value) is not kind:
            raise ConfigError(f"{self.path}: the key {key} must be of type {kind.__name__}, got {type(value).__name__}")
        return value


def is_gguf(source: str) -> bool:
    """Return whether a checkpoint's name is that of a GGUF file."""
    return source.lower().endswith(".gguf")


def read_gguf(path: Path) -> GgufFile:
    """Read the head of a file; raises ConfigError for one that is missing, cut or not GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).file()
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ConfigError(f"{path}: the GGUF file is cut or broken: {error}") from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ConfigError(f"{path}: not a readable GGUF file: {error}") from None


class _Reader:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def file(self) -> GgufFile:
        """Read the whole head."""
        if self._data[:4] != MAGIC:
            raise ConfigError(f"{self._path}: not a GGUF file (its first bytes are {bytes(self._data[:4])!r})")
        self._at = 4
        (version,) = self._unpack("I")
        if version not in VERSIONS:
            raise ConfigError(f"{self._path}: GGUF version {version} is not read (allowed: 2, 3; in little-endian)")
        num_tensors, num_keys = self._unpack("QQ")
        metadata = dict(self._pair() for _ in range(num_keys))
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ConfigError(f"{self._path}: general.alignment must be a positive number, got {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: TensorInfo(shape, kind, start + offset) for name, shape, kind, offset in infos}
        return GgufFile(self._path, metadata, tensors)

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(*self._unpack("I"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._unpack("IQ")
            if inner in _VALUES:
                return list(self._unpack(f"{count}{_VALUES[inner]}"))
            return [self._value(inner) for _ in range(count)]
        if kind not in _VALUES:
            raise ConfigError(f"{self._path}: the GGUF file has a value of the unknown type {kind}")
        return self._unpack(_VALUES[kind])[0]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ConfigError(f"{self._path}: the tensor {name} has {num_dimensions} dimensions, at most 4 allowed")
        shape = self._unpack(f"{num_dimensions}Q")
        return name, shape[::-1], *self._unpack("IQ")

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        (text,) = self._unpack(f"{length}s")
        return str(text, "utf-8")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found
