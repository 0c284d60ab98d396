"""Whether a head's checkpoint fits its target; a refusal names the folder and both values."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from orchestrator.core.errors import ConfigError, first_line, shown
from orchestrator.core.types import FloatArray
from runtime.heads.checkpoint.files import Fields, HeadFiles
from runtime.heads.checkpoint.target_tables import TargetTables
from runtime.model.features import layers_of
from runtime.model.load import check_supported

#: Keys of config.json that build/heads writes.
FINGERPRINT, ACCURACY = "target_fingerprint", "accuracy"
#: Keys of layouts whose tensors have the same names and shapes but another meaning.
FOREIGN_KEYS = ("norm_before_residual", "norm_output")
#: The key that describes rotary positions, and its former name.
ROPES = ("rope_parameters", "rope_scaling")
#: Rotary types that need a factor.
SCALED_ROPES = ("linear", "llama3", "yarn")

log = logging.getLogger(__name__)


def check_files(files: HeadFiles, tables: TargetTables) -> None:
    """Refuse a head of another target, another vocabulary than the target's, and weights that are not finite."""
    meant = files.fields.text(FINGERPRINT, "")
    if meant and not tables.fingerprint:
        log.warning("%s: cannot check whether it was trained for %s", files.folder, tables.name)
    if meant and tables.fingerprint and meant != tables.fingerprint:
        raise ConfigError(
            f"{files.folder} was trained for another target: its target_fingerprint is {meant[:12]}…, "
            f"that of {tables.name} is {tables.fingerprint[:12]}…"
        )
    check_equal(files, "vocab_size", files.fields.number("vocab_size", tables.vocab_size), tables.vocab_size)
    for name, tensor in files.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{files.folder}: {name} has numbers that are not finite")


def check_equal(files: HeadFiles, what: str, found: int, expected: int) -> None:
    """Refuse a size that differs from the target's."""
    if found != expected:
        raise ConfigError(f"{files.folder}: {what} {found}, but the target has {expected}")


def check_layer(files: HeadFiles, tables: TargetTables, fc_width: int, num_states: int) -> None:
    """Refuse an EAGLE layer of another size or kind; num_states: how many states fc reads, counting the embedding."""
    if fc_width % num_states:
        raise ConfigError(f"{files.folder}: fc reads {fc_width} numbers, which are not {num_states} states")
    check_equal(files, "hidden size of the target", fc_width // num_states, tables.hidden_size)
    layers = files.fields.number("num_hidden_layers", 1)
    if layers != 1:
        raise ConfigError(f"{files.folder}: num_hidden_layers is {layers}, but heads of 1 layer are supported")
    activation = files.fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{files.folder}: hidden_act is {activation!r}, but heads have 'silu'")
    _check_sizes(files.fields)
    for key in ROPES:
        _check_rope(files.fields.mapping(key))


def _check_sizes(fields: Fields) -> None:
    """Refuse sizes that no layer has; whether they are this one's, its tensors tell."""
    for key in ("intermediate_size", "max_position_embeddings"):
        fields.number(key, default=1)
    num_heads = fields.number("num_attention_heads")  # shapes alone do not tell how many there are
    num_kv_heads = fields.number("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal("num_key_value_heads", f"divide num_attention_heads {num_heads}", num_kv_heads)
    width = fields.number("hidden_size", LlamaConfig().hidden_size) // num_heads
    width = fields.number("head_dim", max(width, 1))
    if width % 2:
        raise fields.refusal("head_dim", "be even (hidden_size / num_attention_heads where absent)", width)
    fields.positive("rms_norm_eps", default=1)
    fields.positive("rope_theta", default=1)
    fields.flag("mlp_bias", default=False)


def _check_rope(rope: Fields) -> None:
    """Refuse a rotation's numbers that would give no frequencies."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    for key in ("rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        rope.positive(key, default=1)
    rope.number("original_max_position_embeddings", default=1)
    rope.positive("factor", default=None if kind in SCALED_ROPES else 1)


def checked_config(files: HeadFiles, **changes: object) -> LlamaConfig:
    """Return the config of an EAGLE layer; raises ConfigError if its rotary frequencies cannot be computed."""
    values: dict[str, Any] = {key: _without_nulls(value) for key, value in files.config.items() if value is not None}
    values.pop("layer_types", None)  # the target's, if the config was copied from it
    try:
        config = LlamaConfig(**{**values, **changes})
    except Exception as error:  # the class checks its own fields and raises many types
        reason = first_line(error.__cause__ or error)
        raise ConfigError(f"{files.folder}/config.json does not describe a Llama layer: {reason}") from error
    check_supported(config, files.folder)
    _check_frequencies(files, config)
    return config


def _without_nulls(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value


def _check_frequencies(files: HeadFiles, config: LlamaConfig) -> None:
    try:
        finite = bool(torch.isfinite(LlamaRotaryEmbedding(config).inv_freq).all())
        reason = "" if finite else ": its frequencies are not finite"
    except Exception as error:  # each rotary type trusts its own parameters
        reason = f" ({type(error).__name__}: {first_line(error)})"
    if reason:
        raise ConfigError(
            f"{files.folder}/config.json: rope_parameters {shown(config.rope_parameters)} describe no rotation{reason}"
        )


def check_eagle3_layout(files: HeadFiles, tables: TargetTables) -> None:
    """Refuse heads that read other layers of the target, or whose tensors mean another layer."""
    fields, eagle_config = files.fields, files.fields.mapping("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    expected = [*layers_of(tables.depth)]
    layers = fields.numbers(key) or eagle_config.numbers(key) or expected
    if layers[:1] == [1]:  # some writers name layers by their outputs
        layers = [layer + 1 for layer in layers]
    if layers != expected:
        raise ConfigError(f"{files.folder}: reads the inputs of layers {layers}, expected {expected}")
    for key in FOREIGN_KEYS:
        if fields.values.get(key) or eagle_config.values.get(key):
            raise ConfigError(
                f"{files.folder}: {key} marks a layout that differs from EAGLE-3's (docs/heads-formats.md)"
            )


def check_draft_ids(files: HeadFiles, ids: Tensor, vocab_size: int) -> None:
    """Refuse a draft vocabulary that leaves the target's, repeats a token or contradicts t2d; ids: (V_d,)."""
    if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise ConfigError(f"{files.folder}: d2t maps to token {int(ids.max())}, outside the target's vocabulary")
    if len(ids.unique()) < len(ids):
        raise ConfigError(f"{files.folder}: d2t maps two draft ids to one token; it holds distances, not ids")
    t2d = files.tensors.get("t2d")
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
        raise ConfigError(f"{files.folder}: d2t and t2d do not name the same tokens")


def read_accuracy(files: HeadFiles) -> FloatArray:
    """Return (K, R) float64, the measured share of right guesses, by depth and rank."""
    try:
        found = np.array(files.config[ACCURACY], np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.empty(0)
    if found.ndim != 2 or not found.size or not ((found >= 0) & (found <= 1)).all():
        raise ConfigError(f"{ACCURACY} must be lists of shares in 0..1, of one length ({files.folder}/config.json)")
    return found
