"""What a head borrows from the target (embedding, LM head), and the fingerprint that names the target."""

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

from orchestrator.core.deployment.gguf_file import is_gguf
from orchestrator.core.errors import ConfigError
from runtime.models.gguf import read_weights
from runtime.models.heads.checkpoint.files import local_folder, read_tensors
from runtime.models.stock import read_pretrained

#: The fingerprint reads this many pages of this size from each tensor, evenly spread; small tensors are read whole.
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096


class TargetTables(NamedTuple):
    """The target's tables and depth.

    embedding, lm_head: (V, d), the same tensor if the target ties them. depth: number of decoder layers.
    """

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
    """Read the two tables of a checkpoint, and its fingerprint; raises ConfigError if a table is missing."""
    config = read_pretrained(AutoConfig, target)
    embedding, lm_head = _table_names(config)
    if is_gguf(target):
        weights = read_weights(target)
        found = {name: weights.tensors[name].dequantized() for name in {embedding, lm_head}}
    else:
        files = _weight_files(target)
        found = {name: _read(files, name, target) for name in {embedding, lm_head}}
    tables = {name: table.to(device, dtype) for name, table in found.items()}
    depth = config.get_text_config().num_hidden_layers
    return TargetTables(target, tables[embedding], tables[lm_head], depth, fingerprint(target))


def _table_names(config: PretrainedConfig) -> tuple[str, str]:
    """Return the tensor names of the input and the output embedding, which are equal if the two are tied."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return names[id(model.get_input_embeddings().weight)], names[id(model.get_output_embeddings().weight)]


def fingerprint(target: str) -> str:
    """Return a hash over the target's tensors: the name, type and shape of each, and 16 pages spread over it.

    At most 64 KiB of a tensor are read, whatever the model's size. Any contiguous difference that covers a fifteenth of
    a tensor is detected; one between two pages is not. Return "" if the weights are neither safetensors nor GGUF.
    """
    if is_gguf(target):
        digests = sorted(_samples_of_gguf(target))
    else:
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
            sample = hashlib.sha256()
            for offset, size in _pages(end - begin):
                stream.seek(8 + length + begin + offset)
                sample.update(stream.read(size))
            yield f"{name} {entry['dtype']} {entry['shape']} {sample.hexdigest()}"


def _samples_of_gguf(target: str) -> Iterator[str]:
    for name, tensor in read_weights(target).tensors.items():
        content, sample = tensor.blocks.reshape(-1), hashlib.sha256()
        for offset, size in _pages(len(content)):
            sample.update(content[offset : offset + size].tobytes())
        yield f"{name} {tensor.kind.name} {list(tensor.shape)} {sample.hexdigest()}"


def _pages(num_bytes: int) -> list[tuple[int, int]]:
    """Return the offset and size of each page to read of a tensor, its first and its last page included."""
    if num_bytes <= NUM_SAMPLES * SAMPLE_BYTES:
        return [(0, num_bytes)]
    return [(i * (num_bytes - SAMPLE_BYTES) // (NUM_SAMPLES - 1), SAMPLE_BYTES) for i in range(NUM_SAMPLES)]


def _weight_files(target: str) -> list[Path]:
    # A hub id is usually in the cache already, since the target's process fetches it too.
    folder = local_folder(target, ("*.json", "*.safetensors", "pytorch_model*.bin"))
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(f"{target}: no weights (*.safetensors, pytorch_model*.bin)")
    return files


def _read(files: list[Path], name: str, target: str) -> Tensor:
    for file in files:
        if file.suffix != ".safetensors":
            tensors = read_tensors(file)
            if name in tensors:
                return tensors[name]
            continue
        with safe_open(str(file), framework="pt") as content:
            if name in content.keys():  # noqa: SIM118 - it is not a mapping
                tensor: Tensor = content.get_tensor(name)
                return tensor
    raise ConfigError(f"{target}: the checkpoint lacks {name}, which its heads need")
