"""From a head's published checkpoint to its module; refuses, with the two numbers, one that does not fit the target.

Layouts, names and their sources: docs/heads-formats.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from orchestrator.choices import MAX_NODES, best_choices
from orchestrator.errors import ConfigError
from orchestrator.types import FloatArray
from runtime.features import layers_of
from runtime.heads.eagle import Eagle3Head, EagleHead
from runtime.heads.files import HeadFiles, read_head
from runtime.heads.medusa import MedusaHeads
from runtime.heads.redrafter import RecurrentHead
from runtime.heads.tables import TargetTables, read_tables

#: Keys of config.json that are ours.
FINGERPRINT, ACCURACY = "target_fingerprint", "accuracy"

Head = TypeVar("Head", bound=nn.Module)


def load_head(kind: str, folder: str, target: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a head of this kind (a key of KINDS) for a target; raises ConfigError with the reason if it cannot be."""
    files, tables = read_head(folder), read_tables(target, dtype, device)
    _check_target(files, tables)
    head: Any = KINDS[kind](files, tables)
    if ACCURACY in files.config:
        head.own_choices = best_choices(_accuracy(files), MAX_NODES)
    return head.to(device, dtype).eval().requires_grad_(False)


def _check_target(files: HeadFiles, tables: TargetTables) -> None:
    meant = files.config.get(FINGERPRINT, "")
    if meant and tables.fingerprint and meant != tables.fingerprint:
        raise ConfigError(
            f"{files.folder} was trained for another target: its target_fingerprint is {meant[:12]}…, "
            f"that of {tables.name} is {tables.fingerprint[:12]}…"
        )


def _check_equal(files: HeadFiles, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise ConfigError(f"{files.folder}: {what} {found}, but the target has {expected}")


def _load_medusa(files: HeadFiles, tables: TargetTables) -> nn.Module:
    tensors = _renamed(files.tensors, "medusa_head.", "medusa_lm_head.")
    files = files._replace(tensors=tensors)
    indices = {tuple(name.split(".")[:2]) for name in tensors}
    if not indices or not all(part.isdecimal() for index in indices for part in index):
        raise ConfigError(f"{files.folder}: no Medusa heads; their tensors are named 0.0.linear.weight, 0.1.weight, …")
    num_heads, num_layers = (1 + max(int(index[place]) for index in indices) for place in (0, 1))
    if f"0.{num_layers - 1}.linear.weight" not in tensors:
        num_layers -= 1  # the last part is the LM head
    _check_equal(files, "hidden size", files.shape("0.0.linear.weight")[0], tables.hidden_size)
    if f"0.{num_layers}.weight" in tensors:
        _check_equal(files, "vocabulary", files.shape(f"0.{num_layers}.weight")[0], tables.vocab_size)
    heads = MedusaHeads(num_heads, num_layers, tables.lm_head)
    return _filled(heads, files, borrowed=f"{num_layers}.weight")


def _accuracy(files: HeadFiles) -> FloatArray:
    """Return (K, R), how often the guess of each rank for each depth was right, as measured after training."""
    try:
        found = np.array(files.config[ACCURACY], np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2 or not found.size or not ((found >= 0) & (found <= 1)).all():
        raise ConfigError(f"{ACCURACY} must be lists of shares in 0..1, of one length ({files.folder}/config.json)")
    return found


def _load_eagle(files: HeadFiles, tables: TargetTables) -> nn.Module:
    _check_equal(files, "hidden size", files.shape("fc.weight")[0], tables.hidden_size)
    _check_eagle(files, tables, files.shape("fc.weight")[1], 2)
    config = LlamaConfig(**{**files.config, "bias": "fc.bias" in files.tensors, **_attention_bias(files, "layers.0")})
    reads_token = bool(files.config.get("reads_token", True))
    embedding = _own_embedding(files, tables)
    return _filled(EagleHead(config, embedding, tables.lm_head, reads_token), files)


def _load_eagle3(files: HeadFiles, tables: TargetTables) -> nn.Module:
    # NVIDIA's and vLLM's writers call it so.
    tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in files.tensors.items()}
    files = files._replace(tensors=tensors)
    _check_eagle(files, tables, files.shape("fc.weight")[1], 3)
    layers_of(tables.depth)
    _check_eagle3_layout(files, tables)
    draft_vocab_size, width = files.shape("lm_head.weight")
    config = LlamaConfig(**{**files.config, **_attention_bias(files, "midlayer")})
    embedding = _own_embedding(files, tables)
    _check_equal(files, "hidden size", width, embedding.shape[1])
    head = Eagle3Head(config, embedding, draft_vocab_size, tables.hidden_size)
    head = _filled(head, files, borrowed="d2t" if draft_vocab_size == tables.vocab_size else "")
    if int(head.ids.max()) >= tables.vocab_size or int(head.ids.min()) < 0:
        raise ConfigError(f"{files.folder}: d2t leads to token {int(head.ids.max())}, outside the target's vocabulary")
    return head


def _check_eagle3_layout(files: HeadFiles, tables: TargetTables) -> None:
    """Refuse heads that were trained on other layers, or whose layer is another, though their tensors may fit."""
    eagle_config = files.config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    layers = files.config.get(key) or eagle_config.get(key) or [*layers_of(tables.depth)]
    if list(layers) != [*layers_of(tables.depth)]:
        raise ConfigError(f"{files.folder}: reads the inputs of layers {layers}, expected {[*layers_of(tables.depth)]}")
    for key in ("norm_before_residual", "norm_output"):
        if files.config.get(key) or eagle_config.get(key):
            raise ConfigError(f"{files.folder}: {key} is another layout than EAGLE-3's own (docs/heads-formats.md)")


def _attention_bias(files: HeadFiles, layer: str) -> dict[str, bool]:
    # Heads of targets whose projections have a bias have it, too, whatever their config says.
    return {"attention_bias": f"{layer}.self_attn.q_proj.bias" in files.tensors}


def _check_eagle(files: HeadFiles, tables: TargetTables, fc_width: int, num_states: int) -> None:
    """Refuse sizes that are not the target's; fc reads num_states states, with the embedding counted."""
    if fc_width % num_states:
        raise ConfigError(f"{files.folder}: fc reads {fc_width} numbers, which are not {num_states} states")
    _check_equal(files, "hidden size of the target", fc_width // num_states, tables.hidden_size)
    _check_equal(files, "vocabulary", files.number("vocab_size", tables.vocab_size), tables.vocab_size)
    layers = files.number("num_hidden_layers", 1)
    if layers != 1:
        raise ConfigError(f"{files.folder}: num_hidden_layers is {layers}, but heads of 1 layer are supported")


def _own_embedding(files: HeadFiles, tables: TargetTables) -> Tensor:
    """Return the head's embedding, where it has one that differs from the target's, else the target's."""
    own = files.tensors.get("embed_tokens.weight")
    if own is None:
        return tables.embedding
    _check_equal(files, "vocabulary", own.shape[0], tables.vocab_size)
    own = own.to(tables.embedding.device, tables.embedding.dtype)
    return tables.embedding if torch.equal(own, tables.embedding) else own


def _load_redrafter(files: HeadFiles, tables: TargetTables) -> nn.Module:
    num_layers = sum(name.startswith("lm_head.") and name.endswith(".linear.weight") for name in files.tensors)
    rnn = "rnn_u.weight" in files.tensors
    output = f"lm_head.{num_layers}.weight"
    exit_dim = files.shape("lm_head.0.linear.weight" if num_layers else output)[-1]
    _check_equal(files, "hidden size", files.number("hidden_size", tables.hidden_size), tables.hidden_size)
    if output in files.tensors:
        _check_equal(files, "vocabulary", files.shape(output)[0], tables.vocab_size)
    head = RecurrentHead(tables.embedding, num_layers, exit_dim, rnn)
    return _filled(head, files)


def _renamed(tensors: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    """Return the tensors without the prefixes that whole-model files put before a head's names."""
    for prefix in prefixes:
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return dict(tensors)


#: Published, but not read: the embedding is treated apart, t2d follows from d2t.
UNREAD = ("embed_tokens.weight", "t2d")


def _filled(head: Head, files: HeadFiles, borrowed: str = "") -> Head:
    """Load the tensors by name; raises ConfigError for one that is missing, unknown or of another shape.

    borrowed: how the names of tensors end that a file may lack, since the module begins with the target's.
    """
    wanted = head.state_dict()
    found = {name: tensor for name, tensor in files.tensors.items() if name not in UNREAD}
    missing = [name for name in wanted if name not in found and not (borrowed and name.endswith(borrowed))]
    unknown = [name for name in found if name not in wanted]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has an unknown tensor {unknown[0]!r}"
        raise ConfigError(f"{files.folder}: the checkpoint {what} (docs/heads-formats.md)")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ConfigError(
                f"{files.folder}: {name} has the shape {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
            )
    head.load_state_dict(found, strict=False)
    return head


#: Key of serving.toml, and Triton model → how its checkpoint is read.
KINDS: Mapping[str, Callable[[HeadFiles, TargetTables], nn.Module]] = {
    "medusa": _load_medusa,
    "eagle": _load_eagle,
    "eagle3": _load_eagle3,
    "redrafter": _load_redrafter,
}
