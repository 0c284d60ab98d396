"""From a head's published checkpoint to its module; refuses, with the reason, one that does not fit the target.

Layouts, names and their sources: docs/heads-formats.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchestrator.core.errors import ConfigError, first_line
from orchestrator.core.static_trees import best_choices
from orchestrator.core.tree import MAX_NODES
from runtime.heads.checkpoint.checks import (
    ACCURACY,
    accuracy_of,
    check_draft_ids,
    check_eagle3_layout,
    check_equal,
    check_files,
    check_layer,
    checked_config,
)
from runtime.heads.checkpoint.files import HeadFiles, read_head
from runtime.heads.checkpoint.target_tables import TargetTables, read_tables
from runtime.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.heads.modules.layers import HeadAttention
from runtime.heads.modules.medusa import MedusaHeads
from runtime.heads.modules.redrafter import RedrafterHead

Head = TypeVar("Head", bound=nn.Module)

#: Published, but not loaded: the embedding is treated apart, t2d follows from d2t.
UNREAD = ("embed_tokens.weight", "t2d")


def load_head(kind: str, folder: str, target: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a head of this kind (a key of KINDS) for a target; raises ConfigError with the reason if it cannot be."""
    files, tables = read_head(folder), read_tables(target, dtype, device)
    try:
        check_files(files, tables)
        head: Any = KINDS[kind](files, tables)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # A tensor of another rank than the layout's, or a size of config.json that no memory holds.
        raise ConfigError(
            f"{folder}: no {kind} checkpoint: {first_line(error)} (config.json; docs/heads-formats.md)"
        ) from error
    if isinstance(files.config.get(ACCURACY), list):  # a number under this word is of another's training
        head.default_choices = best_choices(accuracy_of(files), MAX_NODES)
    return _cast(head, dtype, device).eval().requires_grad_(False)


def _cast(head: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the head in another type, but for its rotations: at position 1,000 eight bits of a frequency are none."""
    rotations = [module.rotary for module in head.modules() if isinstance(module, HeadAttention)]
    exact = [rotation.inv_freq.clone() for rotation in rotations]
    head.to(device, dtype)
    for rotation, frequencies in zip(rotations, exact, strict=True):
        rotation.register_buffer("inv_freq", frequencies.to(device), persistent=False)
    return head


def _load_medusa(files: HeadFiles, tables: TargetTables) -> nn.Module:
    tensors = _renamed(files.tensors, "medusa_head.", "medusa_lm_head.")
    files = files._replace(tensors=tensors)
    parts = [name.split(".") for name in tensors]
    if not parts or not all(len(part) > 2 and part[0].isdecimal() and part[1].isdecimal() for part in parts):
        raise ConfigError(f"{files.folder}: no Medusa heads; their tensors are named 0.0.linear.weight, 0.1.weight, …")
    num_heads = 1 + max(int(part[0]) for part in parts)
    num_layers = sum(part[0] == "0" and part[2:] == ["linear", "weight"] for part in parts)
    output = f"0.{num_layers}.weight"
    width = files.shape("0.0.linear.weight" if num_layers else output)[-1]
    check_equal(files, "hidden size", width, tables.hidden_size)
    if output in tensors:
        check_equal(files, "vocabulary", files.shape(output)[0], tables.vocab_size)
    return _filled(MedusaHeads(num_heads, num_layers, tables.lm_head, own_outputs=output in tensors), files)


def _load_eagle(files: HeadFiles, tables: TargetTables) -> nn.Module:
    check_equal(files, "hidden size", files.shape("fc.weight")[0], tables.hidden_size)
    check_layer(files, tables, files.shape("fc.weight")[1], 2)
    config = checked_config(files, bias="fc.bias" in files.tensors, attention_bias=_has_bias(files, "layers.0"))
    reads_token = files.fields.flag("reads_token", default=True)
    return _filled(EagleHead(config, _own_embedding(files, tables), tables.lm_head, reads_token), files)


def _load_eagle3(files: HeadFiles, tables: TargetTables) -> nn.Module:
    # NVIDIA's and vLLM's writers call it so.
    tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in files.tensors.items()}
    files = files._replace(tensors=tensors)
    check_layer(files, tables, files.shape("fc.weight")[1], 3)
    check_eagle3_layout(files, tables)
    draft_vocab_size, width = files.shape("lm_head.weight")
    config = checked_config(files, attention_bias=_has_bias(files, "midlayer"))
    embedding = _own_embedding(files, tables)
    check_equal(files, "hidden size", width, embedding.shape[1])
    head = Eagle3Head(config, embedding, draft_vocab_size, tables.hidden_size)
    head = _filled(head, files, optional="d2t" if draft_vocab_size == tables.vocab_size else "")
    check_draft_ids(files, head.ids.cpu(), tables.vocab_size)
    return head


def _load_redrafter(files: HeadFiles, tables: TargetTables) -> nn.Module:
    num_layers = sum(name.startswith("lm_head.") and name.endswith(".linear.weight") for name in files.tensors)
    output = f"lm_head.{num_layers}.weight"
    exit_dim = files.shape("lm_head.0.linear.weight" if num_layers else output)[-1]
    check_equal(files, "hidden size", files.fields.number("hidden_size", tables.hidden_size), tables.hidden_size)
    check_equal(files, "vocabulary", files.shape(output)[0], tables.vocab_size)
    return _filled(RedrafterHead(tables.embedding, num_layers, exit_dim, "rnn_u.weight" in files.tensors), files)


def _has_bias(files: HeadFiles, layer: str) -> bool:
    """Heads of targets whose projections have a bias have it, too, whatever their config says."""
    return f"{layer}.self_attn.q_proj.bias" in files.tensors


def _own_embedding(files: HeadFiles, tables: TargetTables) -> Tensor:
    """Return the head's embedding, where it has one that differs from the target's, else the target's."""
    own = files.tensors.get("embed_tokens.weight")
    if own is None:
        return tables.embedding
    check_equal(files, "vocabulary", own.shape[0], tables.vocab_size)
    own = own.to(tables.embedding.device, tables.embedding.dtype)
    return tables.embedding if torch.equal(own, tables.embedding) else own


def _renamed(tensors: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    """Return the tensors without the prefixes that whole-model files put before a head's names."""
    for prefix in prefixes:
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def _filled(head: Head, files: HeadFiles, optional: str = "") -> Head:
    """Load the tensors by name; raises ConfigError for one that is missing, unknown, or of another shape or kind.

    optional: the one tensor that a file may lack.
    """
    wanted = head.state_dict()
    found = {name: tensor for name, tensor in files.tensors.items() if name not in UNREAD}
    missing = [name for name in wanted if name not in found and name != optional]
    unknown = [name for name in found if name not in wanted]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has an unknown tensor {unknown[0]!r}"
        raise ConfigError(f"{files.folder}: the checkpoint {what} (docs/heads-formats.md)")
    for name, tensor in found.items():
        _check_like(files, name, tensor, wanted[name])
    head.load_state_dict(found, strict=False)
    return head


def _check_like(files: HeadFiles, name: str, tensor: Tensor, wanted: Tensor) -> None:
    if tensor.shape != wanted.shape:
        raise ConfigError(f"{files.folder}: {name} has the shape {tuple(tensor.shape)}, expected {tuple(wanted.shape)}")
    if tensor.is_floating_point() != wanted.is_floating_point():
        raise ConfigError(f"{files.folder}: {name} is {tensor.dtype}, expected {wanted.dtype}")


#: Key of serving.toml, and Triton model → how its checkpoint is read.
KINDS: Mapping[str, Callable[[HeadFiles, TargetTables], nn.Module]] = {
    "medusa": _load_medusa,
    "eagle": _load_eagle,
    "eagle3": _load_eagle3,
    "redrafter": _load_redrafter,
}
