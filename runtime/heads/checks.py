"""What a head's checkpoint must be like for its target; each refusal names the folder and both numbers."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from orchestrator.errors import ConfigError
from orchestrator.types import FloatArray
from runtime.features import layers_of
from runtime.heads.files import HeadFiles
from runtime.heads.tables import TargetTables
from runtime.load import check_supported

#: Keys of config.json that are ours.
FINGERPRINT, ACCURACY = "target_fingerprint", "accuracy"
#: Layouts that fit by name and shape, and mean something else.
FOREIGN_KEYS = ("norm_before_residual", "norm_output")

log = logging.getLogger(__name__)


def check_files(files: HeadFiles, tables: TargetTables) -> None:
    """Refuse a head of another target, a vocabulary that is not the target's, and weights that are no numbers."""
    meant = files.config.get(FINGERPRINT, "")
    if meant and not tables.fingerprint:
        log.warning("%s: whether it was trained for %s cannot be told", files.folder, tables.name)
    if meant and tables.fingerprint and meant != tables.fingerprint:
        raise ConfigError(
            f"{files.folder} was trained for another target: its target_fingerprint is {meant[:12]}…, "
            f"that of {tables.name} is {tables.fingerprint[:12]}…"
        )
    check_equal(files, "vocab_size", files.number("vocab_size", tables.vocab_size), tables.vocab_size)
    for name, tensor in files.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{files.folder}: {name} has numbers that are not finite")


def check_equal(files: HeadFiles, what: str, found: int, expected: int) -> None:
    """Refuse a size that is not the target's."""
    if found != expected:
        raise ConfigError(f"{files.folder}: {what} {found}, but the target has {expected}")


def check_layer(files: HeadFiles, tables: TargetTables, fc_width: int, num_states: int) -> None:
    """Refuse an EAGLE layer of another size or kind; fc reads num_states states, with the embedding counted."""
    if fc_width % num_states:
        raise ConfigError(f"{files.folder}: fc reads {fc_width} numbers, which are not {num_states} states")
    check_equal(files, "hidden size of the target", fc_width // num_states, tables.hidden_size)
    layers = files.number("num_hidden_layers", 1)
    if layers != 1:
        raise ConfigError(f"{files.folder}: num_hidden_layers is {layers}, but heads of 1 layer are supported")
    activation = files.config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{files.folder}: hidden_act is {activation!r}, but heads have 'silu'")
    files.number("num_attention_heads")  # shapes alone do not tell how many there are


def checked_config(files: HeadFiles, **changes: object) -> LlamaConfig:
    """Return the sizes of an EAGLE layer; raises ConfigError when its rotation cannot be cached."""
    try:
        config = LlamaConfig(**{**files.config, **changes})
    except Exception as error:  # the class checks its fields by itself
        raise ConfigError(f"{files.folder}/config.json: {(str(error).splitlines() or [''])[0]}") from error
    check_supported(config, files.folder)
    return config


def check_eagle3_layout(files: HeadFiles, tables: TargetTables) -> None:
    """Refuse heads that were trained on other layers, or whose layer is another, though their tensors may fit."""
    eagle_config = files.config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    expected = [*layers_of(tables.depth)]
    layers = list(files.config.get(key) or eagle_config.get(key) or expected)
    if layers[:1] == [1]:  # named by their outputs
        layers = [layer + 1 for layer in layers]
    if layers != expected:
        raise ConfigError(f"{files.folder}: reads the inputs of layers {layers}, expected {expected}")
    for key in FOREIGN_KEYS:
        if files.config.get(key) or eagle_config.get(key):
            raise ConfigError(f"{files.folder}: {key} is another layout than EAGLE-3's own (docs/heads-formats.md)")


def check_draft_ids(files: HeadFiles, ids: Tensor, vocab_size: int) -> None:
    """Refuse a draft vocabulary, (V_d,) target ids, that leaves the target's, holds a token twice, or is not t2d's."""
    if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise ConfigError(f"{files.folder}: d2t leads to token {int(ids.max())}, outside the target's vocabulary")
    if len(ids.unique()) < len(ids):
        raise ConfigError(f"{files.folder}: d2t leads to one token twice; it holds distances, not ids")
    t2d = files.tensors.get("t2d")
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
        raise ConfigError(f"{files.folder}: d2t and t2d do not name the same tokens")


def accuracy_of(files: HeadFiles) -> FloatArray:
    """Return (K, R), how often the guess of each rank for each depth was right, as measured after training."""
    try:
        found = np.array(files.config[ACCURACY], np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 2 or not found.size or not ((found >= 0) & (found <= 1)).all():
        raise ConfigError(f"{ACCURACY} must be lists of shares in 0..1, of one length ({files.folder}/config.json)")
    return found
