"""The tensors and the config of a head's files, as their authors publish them; it knows no module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orchestrator.core.errors import ConfigError, first_line, shown
from orchestrator.deployment.checkpoint import read_json
from runtime.model.load import resolve


class Fields(NamedTuple):
    """An object of a JSON file. Invariant: null is as absent; what is of another kind is refused with key and value.

    place: where the object stands in the file, with a dot behind it.
    """

    values: Mapping[str, Any]
    file: str
    place: str = ""

    def number(self, key: str, default: int | None = None, low: int = 1) -> int:
        """Return a whole number of at least `low`."""
        value = self._value(key, default)
        if type(value) is not int or value < low:
            raise self.refusal(key, f"be a whole number of at least {low}", value)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refusal(key, "be a number above 0", value)
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "be a text", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "be true or false", value)
        return value

    def numbers(self, key: str) -> list[int]:
        """Return a list of whole numbers, empty where there is none."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise self.refusal(key, "be a list of whole numbers", value)
        return value

    def mapping(self, key: str) -> Fields:
        """Return the object under a key, empty where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, "be an object", value)
        return Fields(value, self.file, f"{self.place}{key}.")

    def refusal(self, key: str, allowed: str, value: object) -> ConfigError:
        """Return the error that says what a value must do or be."""
        return ConfigError(f"{self.place}{key} must {allowed}, got {shown(value)} ({self.file})")

    def _value(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        return default if value is None else value


#: Searched in this order.
WEIGHT_FILES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "pytorch_model.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
    "model.pt",
)


class HeadFiles(NamedTuple):
    """A head's folder: config.json, and its tensors by name."""

    folder: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def fields(self) -> Fields:
        """The config's values, each to be read as what it must be."""
        return Fields(self.config, f"{self.folder}/config.json")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; raises ConfigError if the file lacks it."""
        if name not in self.tensors:
            raise ConfigError(f"{self.folder}: the tensor {name!r} is missing")
        return tuple(self.tensors[name].shape)


def read_head(folder: str) -> HeadFiles:
    """Read a head's folder or hub id; raises ConfigError if it cannot be read."""
    path = local_folder(folder, ("config.json", *WEIGHT_FILES))
    config = read_json(str(path), "config.json") or {}
    file = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if file is None:
        raise ConfigError(f"{folder} has none of the files {', '.join(WEIGHT_FILES)}")
    return HeadFiles(folder, config, read_tensors(file))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; a pickled file may hold nothing but tensors."""
    try:
        if file.suffix == ".safetensors":
            return dict(_safe_tensors(file))
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {first_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ConfigError(f"{file} holds no tensors by name")
    return found


def _safe_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(str(file), framework="pt") as content:
        for name in content.keys():  # noqa: SIM118 - it is not a mapping
            yield name, content.get_tensor(name)


def local_folder(source: str, patterns: Sequence[str]) -> Path:
    """Return `source` if it is a folder, else fetch these files of the hub id; raises ConfigError if that fails."""
    if Path(resolve(source)).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises many types; all mean that the files cannot be had
        raise ConfigError(f"{source}: neither a folder nor a hub id that can be fetched: {error}") from None
