"""Bytes of engines on GPUs: weights, activations, reserve, KV caches; pure arithmetic.

Weights and KV caches are counted; the bytes of activations and of the runtime are estimates (docs/tensorrt-llm.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from build.trtllm.engines import Engine
from build.trtllm.gpus import GIB
from build.trtllm.spec import EngineSpec

#: Bits of a linear layer's weight; block formats with the scales of their blocks: 16 bit for 128 weights
#: (int4_awq), 8 bit for 16 weights (nvfp4).
WEIGHT_BITS = {"none": 16.0, "fp8": 8.0, "int8_sq": 8.0, "int4_awq": 4 + 16 / 128, "nvfp4": 4 + 8 / 16}
KV_BYTES = {"auto": 2, "fp8": 1, "int8": 1}
# Inferred: CUDA context, kernels and communication buffers of one engine on one GPU.
RESERVE_BYTES = 3 * GIB // 2


@dataclass(frozen=True)
class EngineBytes:
    """The bytes of one engine on one GPU; kv_per_token: of one token's keys and values there."""

    weights: int
    activations: int
    reserve: int
    kv_per_token: int

    @property
    def fixed(self) -> int:
        """The bytes beside the KV cache."""
        return self.weights + self.activations + self.reserve


@dataclass(frozen=True)
class GpuBytes:
    """The bytes of one GPU and of the engines there; draft: None on a GPU without a part of the draft model."""

    gpu: int
    total: int
    target: EngineBytes
    draft: EngineBytes | None

    @property
    def parts(self) -> dict[str, EngineBytes]:
        """The engines on this GPU by their roles."""
        return {"target": self.target} | ({"draft": self.draft} if self.draft else {})

    @property
    def free(self) -> int:
        """The bytes left for the KV caches; negative when the rest does not fit."""
        return self.total - sum(part.fixed for part in self.parts.values())


@dataclass(frozen=True)
class KvTokens:
    """How many tokens the KV caches hold; draft: 0 without a draft model."""

    target: int
    draft: int


def gpu_bytes(target: Engine, draft: Engine | None, total: int) -> tuple[GpuBytes, ...]:
    """Return the bytes on each of the target's GPUs; total: of one GPU. A draft model lies on the first ones."""
    return tuple(
        GpuBytes(
            rank,
            total,
            engine_bytes(target, rank),
            engine_bytes(draft, rank) if draft and rank < draft.num_ranks else None,
        )
        for rank in range(target.num_ranks)
    )


def engine_bytes(engine: Engine, rank: int) -> EngineBytes:
    """Return the bytes of one rank of an engine; the ranks of one pipeline stage follow each other."""
    stage = rank // engine.tensor_parallel
    is_last = stage == engine.pipeline_parallel - 1
    layers = engine.shape.layers // engine.pipeline_parallel
    kv_layers = layers + (engine.heads.kv_layers if is_last else 0)
    kv_heads = -(-engine.shape.kv_heads // engine.tensor_parallel)  # with fewer heads than GPUs, each GPU has one
    return EngineBytes(
        weights=_weights(engine, layers, stage == 0, is_last),
        activations=_activations(engine),
        reserve=RESERVE_BYTES,
        kv_per_token=2 * kv_layers * kv_heads * engine.shape.head_dim * KV_BYTES[engine.kv_cache_dtype],
    )


def _weights(engine: Engine, layers: int, is_first: bool, is_last: bool) -> int:
    """Return the bytes of a rank's weights.

    The linear layers, in their format, and the LM head are divided among the ranks; the embedding and the heads are
    whole on their stage. All but the linear layers have 16 bits.
    """
    shape, tp = engine.shape, engine.tensor_parallel
    kv_heads = -(-shape.kv_heads // tp)
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads // tp + kv_heads)
    linear = layers * (attention + shape.mlp_parameters // tp)
    plain = layers * shape.hidden * (shape.experts + 2) + shape.hidden
    if is_first:
        plain += shape.vocab * shape.hidden
    if is_last:
        plain += -(-shape.vocab // tp) * shape.hidden + engine.heads.parameters
    return math.ceil(linear * WEIGHT_BITS[engine.quantisation] / 8) + 2 * plain


def _activations(engine: Engine) -> int:
    """Estimate the bytes of the largest pass: the widest layer for every token, and the logits of every sampled row.

    Inferred: per token, in 16 bits, two residuals and two norms, the attention's projections and both halves of the
    MLP; the logits in float32, once from the LM head, once in the sampler and once more from each Medusa head.
    """
    shape, tp, limits = engine.shape, engine.tensor_parallel, engine.limits
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp
    mlp = 2 * shape.intermediate * shape.experts_per_token // tp
    rows = limits.max_batch_size * (limits.max_draft_len + 1)
    logits = rows * shape.vocab * 4 * (2 + engine.heads.heads)
    return limits.max_num_tokens * 2 * (4 * shape.hidden + attention + mlp) + logits


def kv_tokens(gpus: tuple[GpuBytes, ...], spec: EngineSpec) -> KvTokens:
    """Return the tokens of the caches, as the fullest GPU has room, in whole blocks; 0 when nothing is left."""
    share = spec.draft_kv_share
    with_draft = tuple(gpu for gpu in gpus if gpu.draft)
    if not share or not with_draft:  # both caches see the same texts
        both = _tokens(gpus, spec, lambda gpu: gpu.target.kv_per_token + _draft_kv(gpu))
        return KvTokens(both, both if with_draft else 0)
    target = _tokens(gpus, spec, lambda gpu: gpu.target.kv_per_token / (1 - share if gpu.draft else 1))
    return KvTokens(target, _tokens(with_draft, spec, lambda gpu: _draft_kv(gpu) / share))


def _tokens(gpus: tuple[GpuBytes, ...], spec: EngineSpec, bytes_per_token: Callable[[GpuBytes], float]) -> int:
    tokens = min(spec.kv_fraction * max(gpu.free, 0) / bytes_per_token(gpu) for gpu in gpus)
    return int(tokens) // spec.tokens_per_block * spec.tokens_per_block


def _draft_kv(gpu: GpuBytes) -> int:
    return gpu.draft.kv_per_token if gpu.draft else 0


def kv_fractions(gpus: tuple[GpuBytes, ...], tokens: KvTokens) -> tuple[float, float]:
    """Return kv_cache_free_gpu_mem_fraction for the target and for the draft model (0 without one).

    They are rounded up, because the limit in tokens beside them decides. Each is a share of the memory that is free
    when its engine makes its cache (inferred): the target is loaded first and has the GPU to itself, the draft model
    finds the target's cache made.
    """
    target = max(tokens.target * gpu.target.kv_per_token / (gpu.total - gpu.target.fixed) for gpu in gpus)
    drafts = [
        tokens.draft * _draft_kv(gpu) / (gpu.free - tokens.target * gpu.target.kv_per_token)
        for gpu in gpus
        if gpu.draft
    ]
    return math.ceil(target * 1000) / 1000, math.ceil(max(drafts, default=0.0) * 1000) / 1000
