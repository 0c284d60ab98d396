"""Loads a head's published checkpoint as a module; a checkpoint that does not fit the target is refused.

Layouts, names and their sources: docs/heads-formats.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestrator.core.errors import ConfigError, first_line
from orchestrator.core.static_trees import best_choices
from orchestrator.core.tree import MAX_NODES
from runtime.models.heads.checkpoint.checks import (
    ACCURACY,
    SHARPNESS,
    HeadKeys,
    check_draft_ids,
    check_eagle3_layers,
    check_equal,
    check_files,
    check_layer,
    checked_config,
    read_accuracy,
    read_eagle3_norms,
)
from runtime.models.heads.checkpoint.files import HeadFiles, read_head
from runtime.models.heads.checkpoint.target_tables import TargetTables, read_tables
from runtime.models.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.models.heads.modules.layers import HeadAttention
from runtime.models.heads.modules.medusa import MedusaHeads
from runtime.models.heads.modules.redrafter import RedrafterHead
from runtime.models.heads.sharpness import Sharpness

log = logging.getLogger(__name__)

#: Published tensors that are not parameters: the embedding is compared with the target's, t2d follows from d2t.
NOT_LOADED = ("embed_tokens.weight", "t2d")


def load_head(kind: str, folder: str, target: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a head of this kind (a key of FORMATS) for a target; raises ConfigError if it cannot be loaded or used."""
    files, tables = read_head(folder), read_tables(target, dtype, device)
    try:
        check_files(files, tables)
        head = FORMATS[kind].load(files, tables)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # For example a tensor whose rank differs from the layout's, or a size in config.json that fits no memory.
        raise ConfigError(
            f"{folder}: no {kind} checkpoint: {first_line(error)} (config.json; docs/heads-formats.md)"
        ) from error
    if isinstance(files.config.get(ACCURACY), list):  # other trainers write a number under this key
        head.default_choices = best_choices(read_accuracy(files), MAX_NODES)
    measured = files.read(HeadKeys).sharpness
    head.sharpness = Sharpness(measured.argmax, measured.sampled)
    if SHARPNESS not in files.config:
        log.info("%s: its sharpness was not measured, 1 is assumed (python -m build.heads.sharpness)", folder)
    return _cast(head, dtype, device).eval().requires_grad_(False)


def _cast(head: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Cast the head, except its rotary frequencies: in bfloat16 they are too coarse for positions above 1,000."""
    rotations = [module.rotary for module in head.modules() if isinstance(module, HeadAttention)]
    exact = [rotation.inv_freq.clone() for rotation in rotations]
    head.to(device, dtype)
    for rotation, frequencies in zip(rotations, exact, strict=True):
        rotation.register_buffer("inv_freq", frequencies.to(device), persistent=False)
    return head


class Format(NamedTuple):
    """How the checkpoint of one kind of head is read.

    build: returns a module of the sizes found in the files, before its parameters are loaded. prefixes: prefix of
    tensor names in some files → the authors' prefix. optional: a tensor that a file may lack.
    """

    build: Callable[[HeadFiles, TargetTables], nn.Module]
    prefixes: Mapping[str, str] = {}
    optional: str = ""

    def load(self, files: HeadFiles, tables: TargetTables) -> Any:
        """Return the module with the tensors of the files."""
        tensors = files.tensors
        for theirs, authors in self.prefixes.items():
            tensors = {
                authors + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
                for name, tensor in tensors.items()
            }
        files = files._replace(tensors=tensors)
        head = self.build(files, tables)
        _fill(head, files, self.optional)
        if isinstance(head, Eagle3Head):
            check_draft_ids(files, head.ids.cpu(), tables.vocab_size)
        return head


def _fill(head: nn.Module, files: HeadFiles, optional: str) -> None:
    """Load the tensors by name; raises ConfigError if one is missing, unknown, or of another shape or type."""
    expected = head.state_dict()
    found = {name: tensor for name, tensor in files.tensors.items() if name not in NOT_LOADED}
    missing = [name for name in expected if name not in found and name != optional]
    unknown = [name for name in found if name not in expected]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has an unknown tensor {unknown[0]!r}"
        raise ConfigError(f"{files.folder}: the checkpoint {what} (docs/heads-formats.md)")
    for name, tensor in found.items():
        shape, dtype = expected[name].shape, expected[name].dtype
        if tensor.shape != shape:
            raise ConfigError(f"{files.folder}: {name} has the shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if tensor.is_floating_point() != dtype.is_floating_point:
            raise ConfigError(f"{files.folder}: {name} is {tensor.dtype}, expected {dtype}")
    head.load_state_dict(found, strict=False)


def _medusa(files: HeadFiles, tables: TargetTables) -> nn.Module:
    parts = [name.split(".") for name in files.tensors]
    if not parts or not all(len(part) > 2 and part[0].isdecimal() and part[1].isdecimal() for part in parts):
        raise ConfigError(f"{files.folder}: no Medusa heads; their tensors are named 0.0.linear.weight, 0.1.weight, …")
    num_heads = 1 + max(int(part[0]) for part in parts)
    num_layers = sum(part[0] == "0" and part[2:] == ["linear", "weight"] for part in parts)
    output = f"0.{num_layers}.weight"
    has_outputs = output in files.tensors
    width = files.shape("0.0.linear.weight" if num_layers else output)[-1]
    check_equal(files, "hidden size", width, tables.hidden_size)
    if has_outputs:
        check_equal(files, "vocabulary", files.shape(output)[0], tables.vocab_size)
    return MedusaHeads(num_heads, num_layers, tables.lm_head, own_outputs=has_outputs)


def _eagle(files: HeadFiles, tables: TargetTables) -> nn.Module:
    check_equal(files, "hidden size", files.shape("fc.weight")[0], tables.hidden_size)
    check_layer(files, tables, files.shape("fc.weight")[1], 2)
    config = checked_config(files, bias="fc.bias" in files.tensors, attention_bias=_has_bias(files, "layers.0"))
    reads_token = files.read(HeadKeys).reads_token
    return EagleHead(config, _embedding(files, tables), tables.lm_head, reads_token)


def _eagle3(files: HeadFiles, tables: TargetTables) -> nn.Module:
    check_layer(files, tables, files.shape("fc.weight")[1], 3)
    check_eagle3_layers(files, tables)
    norms = read_eagle3_norms(files)
    draft_vocab_size, width = files.shape("lm_head.weight")
    if draft_vocab_size != tables.vocab_size:
        files.shape("d2t")  # raises ConfigError if it is missing
    config = checked_config(files, attention_bias=_has_bias(files, "midlayer"))
    embedding = _embedding(files, tables)
    check_equal(files, "hidden size", width, embedding.shape[1])
    return Eagle3Head(config, embedding, draft_vocab_size, tables.hidden_size, norms)


def _redrafter(files: HeadFiles, tables: TargetTables) -> nn.Module:
    num_layers = sum(name.startswith("lm_head.") and name.endswith(".linear.weight") for name in files.tensors)
    output = f"lm_head.{num_layers}.weight"
    exit_dim = files.shape("lm_head.0.linear.weight" if num_layers else output)[-1]
    check_equal(files, "hidden size", files.read(HeadKeys).hidden_size or tables.hidden_size, tables.hidden_size)
    check_equal(files, "vocabulary", files.shape(output)[0], tables.vocab_size)
    return RedrafterHead(tables.embedding, num_layers, exit_dim, "rnn_u.weight" in files.tensors)


def _has_bias(files: HeadFiles, layer: str) -> bool:
    """Return whether the projections have a bias, by the tensors, since the config only copies the target's."""
    return f"{layer}.self_attn.q_proj.bias" in files.tensors


def _embedding(files: HeadFiles, tables: TargetTables) -> Tensor:
    """Return the head's own embedding if it differs from the target's, otherwise the target's."""
    own = files.tensors.get("embed_tokens.weight")
    if own is None:
        return tables.embedding
    check_equal(files, "vocabulary", own.shape[0], tables.vocab_size)
    own = own.to(tables.embedding.device, tables.embedding.dtype)
    return tables.embedding if torch.equal(own, tables.embedding) else own


#: Key of serving.toml and name of the Triton model → how its checkpoint is read.
FORMATS: Mapping[str, Format] = {
    "medusa": Format(_medusa, prefixes={"medusa_head.": "", "medusa_lm_head.": ""}),
    "eagle": Format(_eagle),
    "eagle3": Format(_eagle3, prefixes={"layers.0.": "midlayer."}, optional="d2t"),
    "redrafter": Format(_redrafter),
}
