"""What a head borrows of the target: its embedding, its LM head, and a fingerprint that names it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from orchestrator.errors import ConfigError
from runtime.heads.files import read_tensors

SAMPLE_BYTES = 4096


class TargetTables(NamedTuple):
    """embedding, lm_head: (V, d), one tensor where the target ties them. depth: decoder layers."""

    name: str
    embedding: Tensor
    lm_head: Tensor
    depth: int
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head."""
        return int(self.lm_head.shape[0])

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.embedding.shape[1])


def read_tables(target: str, dtype: torch.dtype, device: torch.device) -> TargetTables:
    """Read the two tables out of a checkpoint's files, and nothing else; raises ConfigError when they are not there."""
    config = AutoConfig.from_pretrained(target, trust_remote_code=False)
    embedding, lm_head = _table_names(config)
    files = _weight_files(target)
    tables = {name: _read(files, name, target).to(device, dtype) for name in {embedding, lm_head}}
    depth = config.get_text_config().num_hidden_layers
    return TargetTables(target, tables[embedding], tables[lm_head], depth, fingerprint(target))


def _table_names(config: PretrainedConfig) -> tuple[str, str]:
    """Return the names of the input and the output embedding's tensors; of tied ones the same, twice."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    embedding = names[id(model.get_input_embeddings().weight)]
    if config.get_text_config().tie_word_embeddings:
        embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
        return embedding, embedding
    return embedding, names[id(model.get_output_embeddings().weight)]


def fingerprint(target: str) -> str:
    """Return a hash of the target's tensors: their names, types, shapes and the first bytes of each.

    It reads a few kilobytes a tensor, whatever the model's size; "" where the weights are no safetensors.
    """
    files = [file for file in _weight_files(target) if file.suffix == ".safetensors"]
    digests = sorted(part for file in files for part in _samples(file))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else ""


def _samples(file: Path) -> Iterator[str]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            stream.seek(8 + length + begin)
            sample = hashlib.sha256(stream.read(min(end - begin, SAMPLE_BYTES))).hexdigest()
            yield f"{name} {entry['dtype']} {entry['shape']} {sample}"


def _weight_files(target: str) -> list[Path]:
    folder = _folder(target)
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(f"{target}: no weights (*.safetensors, pytorch_model*.bin)")
    return files


def _folder(target: str) -> Path:
    if Path(target).is_dir():
        return Path(target)
    from huggingface_hub import snapshot_download

    try:  # the target's own process has fetched it, or is at it
        return Path(snapshot_download(target, allow_patterns=["*.json", "*.safetensors", "pytorch_model*.bin"]))
    except Exception as error:
        raise ConfigError(f"{target}: neither a folder nor a hub id that can be fetched: {error}") from None


def _read(files: list[Path], name: str, target: str) -> Tensor:
    for file in files:
        if file.suffix != ".safetensors":
            tensors = read_tensors(file)
            if name in tensors:
                return tensors[name]
            continue
        with safe_open(str(file), framework="pt") as content:
            if name in content.keys():  # noqa: SIM118 - it is no mapping
                tensor: Tensor = content.get_tensor(name)
                return tensor
    raise ConfigError(f"{target}: the checkpoint lacks {name}, from which its heads would draft")
