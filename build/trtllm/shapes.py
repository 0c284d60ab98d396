"""Sizes of a model, read from its checkpoint's config.json; it opens no weights."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import AliasChoices, Field

from orchestrator.core.declarations import ConfigKeys, Model, validate_config
from orchestrator.core.deployment.checkpoint import read_json
from orchestrator.core.errors import ConfigError

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


class _ModelKeys(ConfigKeys):
    architectures: list[str] = Field(min_length=1, description="a list of names")
    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    intermediate_size: int = Field(ge=1)
    moe_intermediate_size: int | None = Field(None, ge=1)
    vocab_size: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    num_local_experts: int = Field(0, ge=0, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: int = Field(1, ge=1)


class _MedusaKeys(ConfigKeys):
    medusa_num_heads: int | None = Field(None, ge=1)
    medusa_num_layers: int = Field(1, ge=1)


class _RedrafterKeys(ConfigKeys):
    hidden_size: int | None = Field(None, ge=1)
    vocab_size: int | None = Field(None, ge=1)
    exit_dim: int | None = Field(None, ge=1)
    num_draft_layers: int = Field(2, ge=1)


def read_shape(source: str) -> ModelShape:
    """Read a model's sizes; raises ConfigError naming the file and the key that is missing or wrong."""
    keys = _read(_ModelKeys, source)
    dense, experts = keys.intermediate_size, keys.num_local_experts
    return ModelShape(
        architecture=keys.architectures[0],
        layers=keys.num_hidden_layers,
        hidden=keys.hidden_size,
        heads=keys.num_attention_heads,
        kv_heads=keys.num_key_value_heads or keys.num_attention_heads,
        head_dim=keys.head_dim or keys.hidden_size // keys.num_attention_heads,
        intermediate=(keys.moe_intermediate_size or dense) if experts else dense,
        vocab=keys.vocab_size,
        max_positions=keys.max_position_embeddings,
        experts=experts,
        experts_per_token=keys.num_experts_per_tok if experts else 1,
    )


@dataclass(frozen=True)
class HeadShape:
    """Heads inside the target's engine. heads, blocks: Medusa heads and the residual blocks of each; else 0.

    parameters: of all of them, an upper bound. kv_layers: decoder layers, each with a KV cache as wide as the target's.
    """

    heads: int = 0
    blocks: int = 0
    parameters: int = 0
    kv_layers: int = 0


def medusa_heads(source: str, target: ModelShape, num_heads: int) -> HeadShape:
    """Return the size of `num_heads` Medusa heads (0 = all in the checkpoint): residual blocks and an LM head each."""
    keys = _read(_MedusaKeys, source)
    trained = keys.medusa_num_heads or num_heads or 4
    if num_heads > trained:
        raise ConfigError(
            f"medusa_heads must be in 1..{trained}, got {num_heads} ({source}/config.json, key medusa_heads)"
        )
    heads, blocks = num_heads or trained, keys.medusa_num_layers
    block = target.hidden * target.hidden + target.hidden
    return HeadShape(heads, blocks, heads * (blocks * block + target.hidden * target.vocab))


def eagle_heads(source: str, target: ModelShape, layers: int) -> HeadShape:
    """Return the size of an EAGLE-1 drafter.

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
    """Return the size of a ReDrafter: residual blocks and LM head of width exit_dim, two matrices of the recurrence.

    The keys are those that examples/redrafter/convert_checkpoint.py reads. Inferred: without exit_dim the width is
    twice the hidden size.
    """
    keys = _read(_RedrafterKeys, source)
    _check_same("vocab_size", keys.vocab_size or target.vocab, target.vocab, source)
    hidden, blocks = keys.hidden_size or target.hidden, keys.num_draft_layers
    width = keys.exit_dim or 2 * hidden
    return HeadShape(parameters=blocks * (width * width + width) + width * target.vocab + 2 * hidden * hidden)


def model_parameters(shape: ModelShape) -> int:
    """Count a model's weights: layers, embedding and LM head (both, even if they are tied), router, norms."""
    layer = shape.attention_parameters + shape.mlp_parameters + shape.hidden * (shape.experts + 2)
    return shape.layers * layer + 2 * shape.vocab * shape.hidden + shape.hidden


def _check_same(key: str, value: int, expected: int, source: str) -> None:
    if value != expected:
        raise ConfigError(f"{key} must be the target's {expected}, got {value} ({source}/config.json)")


def _read(model: type[Model], source: str) -> Model:
    """Return the language model's keys of config.json; raises ConfigError for a missing file or an invalid value."""
    config = read_json(source, "config.json")
    if config is None:
        # A hub id without a network ends here, too, so the message must not blame the checkpoint alone.
        raise ConfigError(f"{source}: config.json cannot be found (for a plan, a folder that holds it is enough)")
    inner = config.get("text_config")
    values = inner | {"architectures": config.get("architectures")} if isinstance(inner, dict) else config
    return validate_config(model, values, f"{source}/config.json")
