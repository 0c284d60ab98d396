"""Sizes of a model, read from its checkpoint's config.json; opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.core.errors import ConfigError
from orchestrator.deployment.checkpoint import read_json

LLAMA = "LlamaForCausalLM"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with gated MLPs. experts: 0 = dense; intermediate: of one expert where there are any.

    max_positions: longest context in tokens.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    experts: int = 0
    experts_per_token: int = 1

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's four projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one layer's MLP, of all experts where there are any."""
        return 3 * self.hidden * self.intermediate * max(self.experts, 1)


def read_shape(source: str) -> ModelShape:
    """Read a model's sizes; raises ConfigError naming the file or the key that is missing."""
    config = _config(source)
    hidden = _number(config, source, "hidden_size")
    heads = _number(config, source, "num_attention_heads")
    experts = _number(config, source, "num_local_experts", "num_experts", default=0)
    dense = _number(config, source, "intermediate_size")
    return ModelShape(
        architecture=_architecture(config, source),
        layers=_number(config, source, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(config, source, "num_key_value_heads", default=heads),
        head_dim=_number(config, source, "head_dim", default=hidden // heads),
        intermediate=_number(config, source, "moe_intermediate_size", default=dense) if experts else dense,
        vocab=_number(config, source, "vocab_size"),
        max_positions=_number(config, source, "max_position_embeddings"),
        experts=experts,
        experts_per_token=_number(config, source, "num_experts_per_tok", default=1) if experts else 1,
    )


@dataclass(frozen=True)
class HeadShape:
    """Heads inside the target's engine. heads, blocks: Medusa's and the residual blocks of each, else 0.

    parameters: of all of them, an upper bound. kv_layers: decoder layers, each with a KV cache as wide as the target's.
    """

    heads: int = 0
    blocks: int = 0
    parameters: int = 0
    kv_layers: int = 0


def medusa_heads(source: str, target: ModelShape, wanted: int) -> HeadShape:
    """Size `wanted` Medusa heads (0 = all that the checkpoint has): residual blocks and an LM head each."""
    config = _config(source)
    trained = _number(config, source, "medusa_num_heads", default=wanted or 4)
    if wanted > trained:
        raise ConfigError(
            f"medusa_heads must be in 1..{trained}, got {wanted} ({source}/config.json, key medusa_heads)"
        )
    blocks = _number(config, source, "medusa_num_layers", default=1)
    heads = wanted or trained
    block = target.hidden * target.hidden + target.hidden
    return HeadShape(heads, blocks, heads * (blocks * block + target.hidden * target.vocab))


def eagle_heads(source: str, target: ModelShape, layers: int) -> HeadShape:
    """Size an EAGLE-1 drafter.

    Inferred: each of the engine's EAGLE layers holds the drafter's weights and an LM head of its own.
    """
    drafter = read_shape(source)
    _check_same("hidden_size", drafter.hidden, target.hidden, source)
    _check_same("vocab_size", drafter.vocab, target.vocab, source)
    one = eagle_parameters(drafter) + target.hidden * target.vocab
    return HeadShape(parameters=layers * one, kv_layers=layers * drafter.layers)


def eagle_parameters(drafter: ModelShape) -> int:
    """Count an EAGLE-1 drafter's own weights: the projection of 2 hidden to hidden, and its decoder layers."""
    layer = drafter.attention_parameters + drafter.mlp_parameters
    return 2 * drafter.hidden * drafter.hidden + drafter.layers * layer


def redrafter_heads(source: str, target: ModelShape) -> HeadShape:
    """Size a ReDrafter: residual blocks and LM head at the width exit_dim, two matrices of the recurrence.

    Inferred: the key names, and twice the hidden size where exit_dim is not given.
    """
    config = _config(source)
    hidden = _number(config, source, "hidden_size", default=target.hidden)
    _check_same("vocab_size", _number(config, source, "vocab_size", default=target.vocab), target.vocab, source)
    width = _number(config, source, "exit_dim", default=2 * hidden)
    blocks = _number(config, source, "num_draft_layers", default=2)
    return HeadShape(parameters=blocks * (width * width + width) + width * target.vocab + 2 * hidden * hidden)


def model_parameters(shape: ModelShape) -> int:
    """Count a model's weights: layers, embedding and LM head (both, even where they are one), router, norms."""
    layer = shape.attention_parameters + shape.mlp_parameters + shape.hidden * (shape.experts + 2)
    return shape.layers * layer + 2 * shape.vocab * shape.hidden + shape.hidden


def _check_same(key: str, value: int, expected: int, source: str) -> None:
    if value != expected:
        raise ConfigError(f"{key} must be the target's {expected}, got {value} ({source}/config.json)")


def _config(source: str) -> dict[str, Any]:
    config = read_json(source, "config.json")
    if config is None:
        # Also what a hub id without a network looks like; the message must not blame the checkpoint alone.
        raise ConfigError(f"{source}: config.json is not to be had (a folder that holds it is enough for a plan)")
    inner = config.get("text_config")
    return inner | {"architectures": config.get("architectures")} if isinstance(inner, dict) else config


def _architecture(config: dict[str, Any], source: str) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or type(names[0]) is not str:
        raise ConfigError(f"architectures must be a list of names, got {names!r} ({source}/config.json)")
    return str(names[0])


def _number(config: dict[str, Any], source: str, *keys: str, default: int | None = None) -> int:
    """Return the first of `keys` that is there and not null, else `default`."""
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if type(value) is not int or value < 0 or (value == 0 and default != 0):
        raise ConfigError(f"{keys[0]} must be a positive whole number, got {value!r} ({source}/config.json)")
    return value
