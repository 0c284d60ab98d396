"""The tensors and the config in a head's files, as the authors publish them; independent of any module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orchestrator.core.declarations import Model, validate_config
from orchestrator.core.deployment.checkpoint import read_json
from orchestrator.core.errors import ConfigError, first_line
from runtime.models.stock import resolve

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
    def config_file(self) -> str:
        """The name of config.json, for messages."""
        return f"{self.folder}/config.json"

    def read(self, model: type[Model]) -> Model:
        """Return these keys of config.json; raises ConfigError if one has an invalid value."""
        return validate_config(model, self.config, self.config_file)

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
    """Return the tensors of a file by name; a pickled file may hold only tensors."""
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
    """Return `source` if it is a folder, otherwise fetch these files of the hub id; raises ConfigError on failure."""
    if Path(resolve(source)).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises many types; all mean that the files cannot be fetched
        raise ConfigError(f"{source}: neither a folder nor a hub id that can be fetched: {error}") from None
