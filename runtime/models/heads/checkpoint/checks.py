"""Checks that a head's checkpoint fits its target; an error names the folder and both values."""

from __future__ import annotations

import logging

import numpy as np
import torch
from pydantic import AliasChoices, Field
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from orchestrator.core.arrays import FloatArray
from orchestrator.core.declarations import ConfigKeys, refusal, without_nulls
from orchestrator.core.errors import ConfigError, abbreviated, first_line
from runtime.models.features import layers_of
from runtime.models.heads.checkpoint.files import HeadFiles
from runtime.models.heads.checkpoint.target_tables import TargetTables
from runtime.models.heads.modules.eagle import Eagle3Norms
from runtime.models.heads.sharpness import LEAST
from runtime.models.load import check_supported

#: Keys of config.json that build/heads writes.
FINGERPRINT, ACCURACY, SHARPNESS = "target_fingerprint", "accuracy", "sharpness"
#: The key that describes rotary positions, and its former name.
ROPES = ("rope_parameters", "rope_scaling")
#: Rotary types that need a factor.
SCALED_ROPES = ("linear", "llama3", "yarn")

log = logging.getLogger(__name__)


class SharpnessKeys(ConfigKeys):
    """`runtime.models.heads.sharpness.Sharpness`, as measured for a drafter."""

    argmax: float = Field(1.0, ge=LEAST, le=1.0)
    sampled: float = Field(1.0, ge=LEAST, le=1.0)


class MeasuredKeys(ConfigKeys):
    """Keys that are measured for any drafter."""

    sharpness: SharpnessKeys = SharpnessKeys()


class HeadKeys(MeasuredKeys):
    """Keys that any head may have."""

    target_fingerprint: str = ""
    vocab_size: int | None = Field(None, ge=1)
    hidden_size: int | None = Field(None, ge=1)
    #: whether an EAGLE layer reads the token as well as the target's state
    reads_token: bool = True


class RopeKeys(ConfigKeys):
    """Keys that describe rotary positions; which of them a rotary type needs is mostly left to transformers."""

    rope_type: str = Field("default", validation_alias=AliasChoices("rope_type", "type"))
    factor: float | None = Field(None, gt=0)
    rope_theta: float | None = Field(None, gt=0)
    low_freq_factor: float | None = Field(None, gt=0)
    high_freq_factor: float | None = Field(None, gt=0)
    beta_fast: float | None = Field(None, gt=0)
    beta_slow: float | None = Field(None, gt=0)
    original_max_position_embeddings: int | None = Field(None, ge=1)


class Eagle3Keys(ConfigKeys):
    """The target's layers that an EAGLE-3 head reads (empty if not given), and the norms of EAGLE-3.1."""

    eagle_aux_hidden_state_layer_ids: list[int] = []
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False


class LayerKeys(Eagle3Keys):
    """Keys that describe an EAGLE layer, named as in transformers."""

    num_hidden_layers: int = Field(1, ge=1)
    hidden_act: str = "silu"
    hidden_size: int = Field(LlamaConfig().hidden_size, ge=1)
    num_attention_heads: int = Field(ge=1)  # cannot be inferred from the shapes alone
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=1)
    max_position_embeddings: int | None = Field(None, ge=1)
    rms_norm_eps: float | None = Field(None, gt=0)
    rope_theta: float | None = Field(None, gt=0)
    mlp_bias: bool = False
    rope_parameters: RopeKeys = RopeKeys()
    rope_scaling: RopeKeys = RopeKeys()
    eagle_config: Eagle3Keys = Eagle3Keys()


def check_files(files: HeadFiles, tables: TargetTables) -> None:
    """Refuse a head made for another target, a vocabulary of another size, and weights that are not finite."""
    keys = files.read(HeadKeys)
    meant = keys.target_fingerprint
    if meant and not tables.fingerprint:
        log.warning("%s: cannot check whether it was trained for %s", files.folder, tables.name)
    if meant and tables.fingerprint and meant != tables.fingerprint:
        raise ConfigError(
            f"{files.folder} was trained for another target: its target_fingerprint is {meant[:12]}…, "
            f"that of {tables.name} is {tables.fingerprint[:12]}…"
        )
    check_equal(files, "vocab_size", keys.vocab_size or tables.vocab_size, tables.vocab_size)
    for name, tensor in files.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{files.folder}: {name} has numbers that are not finite")


def check_equal(files: HeadFiles, what: str, found: int, expected: int) -> None:
    """Refuse a size that differs from the target's."""
    if found != expected:
        raise ConfigError(f"{files.folder}: {what} {found}, but the target has {expected}")


def check_layer(files: HeadFiles, tables: TargetTables, fc_width: int, num_states: int) -> None:
    """Refuse an EAGLE layer of the wrong size or kind; num_states: how many states fc reads, embedding included."""
    if fc_width % num_states:
        raise ConfigError(f"{files.folder}: fc reads {fc_width} numbers, which are not {num_states} states")
    check_equal(files, "hidden size of the target", fc_width // num_states, tables.hidden_size)
    keys = files.read(LayerKeys)
    if keys.num_hidden_layers != 1:
        raise ConfigError(
            f"{files.folder}: num_hidden_layers is {keys.num_hidden_layers}, but heads of 1 layer are supported"
        )
    if keys.hidden_act != "silu":
        raise ConfigError(f"{files.folder}: hidden_act is {keys.hidden_act!r}, but heads have 'silu'")
    _check_attention(keys, files.config_file)
    for key in ROPES:
        rope: RopeKeys = getattr(keys, key)
        if rope.rope_type in SCALED_ROPES and rope.factor is None:
            raise ConfigError(refusal(f"{key}.factor", None, RopeKeys.model_fields["factor"], files.config_file))


def _check_attention(keys: LayerKeys, file: str) -> None:
    """Refuse a number of attention heads that num_key_value_heads does not divide, and an odd head_dim."""
    num_heads, num_kv_heads = keys.num_attention_heads, keys.num_key_value_heads
    if num_kv_heads and num_heads % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads must divide num_attention_heads {num_heads}, got {num_kv_heads} ({file})"
        )
    width = keys.head_dim or max(keys.hidden_size // num_heads, 1)
    if width % 2:
        raise ConfigError(
            f"head_dim must be even (hidden_size / num_attention_heads where absent), got {width} ({file})"
        )


def checked_config(files: HeadFiles, **changes: object) -> LlamaConfig:
    """Return the config of an EAGLE layer; raises ConfigError if its rotary frequencies cannot be computed."""
    values = without_nulls(files.config)
    values.pop("layer_types", None)  # the target's, if the config was copied from it
    try:
        config = LlamaConfig(**{**values, **changes})
    except Exception as error:  # the class checks its own fields and raises many types
        reason = first_line(error.__cause__ or error)
        raise ConfigError(f"{files.folder}/config.json does not describe a Llama layer: {reason}") from error
    check_supported(config, files.folder)
    _check_frequencies(files, config)
    return config


def _check_frequencies(files: HeadFiles, config: LlamaConfig) -> None:
    try:
        finite = bool(torch.isfinite(LlamaRotaryEmbedding(config).inv_freq).all())
        reason = "" if finite else ": its frequencies are not finite"
    except Exception as error:  # the rotary types do not validate their parameters
        reason = f" ({type(error).__name__}: {first_line(error)})"
    if reason:
        raise ConfigError(
            f"{files.folder}/config.json: rope_parameters {abbreviated(config.rope_parameters)} "
            f"describe no rotation{reason}"
        )


def check_eagle3_layers(files: HeadFiles, tables: TargetTables) -> None:
    """Refuse a head that does not read the target's layers given by `layers_of`."""
    keys = files.read(LayerKeys)
    expected = [*layers_of(tables.depth)]
    layers = keys.eagle_aux_hidden_state_layer_ids or keys.eagle_config.eagle_aux_hidden_state_layer_ids or expected
    if layers[:1] == [1]:  # some writers name layers by their outputs
        layers = [layer + 1 for layer in layers]
    if layers != expected:
        raise ConfigError(f"{files.folder}: reads the inputs of layers {layers}, expected {expected}")


def read_eagle3_norms(files: HeadFiles) -> Eagle3Norms:
    """Return the norms named in config.json; raises ConfigError if they exclude each other or omit one in the file."""
    keys = files.read(LayerKeys)
    norms = Eagle3Norms(*(getattr(keys, key) or getattr(keys.eagle_config, key) for key in Eagle3Norms._fields))
    if norms.fc_norm and norms.norm_before_fc:
        raise ConfigError(f"{files.folder}: fc_norm and norm_before_fc exclude each other: one norm stands before fc")
    for key, tensor in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        if tensor in files.tensors and not getattr(norms, key):
            raise ConfigError(f"{files.folder}: {tensor} is there, but {key} is not true (config.json)")
    return norms


def check_draft_ids(files: HeadFiles, ids: Tensor, vocab_size: int) -> None:
    """Refuse a draft vocabulary that exceeds the target's, repeats a token or contradicts t2d; ids: (V_d,)."""
    if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise ConfigError(f"{files.folder}: d2t maps to token {int(ids.max())}, outside the target's vocabulary")
    if len(ids.unique()) < len(ids):
        raise ConfigError(f"{files.folder}: d2t maps two draft ids to one token; it holds distances, not ids")
    t2d = files.tensors.get("t2d")
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
        raise ConfigError(f"{files.folder}: d2t and t2d do not name the same tokens")


def read_accuracy(files: HeadFiles) -> FloatArray:
    """Return the measured share of correct guesses by depth and rank, (K, R) float64."""
    try:
        found = np.array(files.config[ACCURACY], np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.empty(0)
    if found.ndim != 2 or not found.size or not ((found >= 0) & (found <= 1)).all():
        raise ConfigError(f"{ACCURACY} must be lists of shares in 0..1, of one length ({files.folder}/config.json)")
    return found
