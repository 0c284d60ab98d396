"""Bytes of engines on GPUs: weights, activations, reserve, KV caches; pure arithmetic.

Weights and KV caches are counted; what activations and the runtime take is an estimate (docs/tensorrt-llm.md).
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
    """What one engine holds on one GPU, in bytes; kv_per_token: of one token's keys and values there."""

    weights: int
    activations: int
    reserve: int
    kv_per_token: int

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.activations + self.reserve


@dataclass(frozen=True)
class GpuBytes:
    """One GPU: its memory, what the engines hold there (draft: None where it has no part), all in bytes."""

    gpu: int
    total: int
    target: EngineBytes
    draft: EngineBytes | None

    @property
    def free(self) -> int:
        """What is left beside weights, activations and reserve; negative when they do not fit."""
        return self.total - self.target.fixed - (self.draft.fixed if self.draft else 0)


@dataclass(frozen=True)
class KvTokens:
    """Tokens that the KV caches hold; draft: 0 without a draft model."""

    target: int
    draft: int


def gpu_bytes(target: Engine, draft: Engine | None, total: int) -> tuple[GpuBytes, ...]:
    """Return what each of the target's GPUs holds; total: bytes of one GPU. A draft model lies on the first ones."""
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
    """Return what the engine's rank holds; ranks of one pipeline stage follow each other."""
    stage = rank // engine.tensor_parallel
    is_last = stage == engine.pipeline_parallel - 1
    layers = engine.shape.layers // engine.pipeline_parallel
    kv_layers = layers + (engine.heads.kv_layers if is_last else 0)
    kv_heads = -(-engine.shape.kv_heads // engine.tensor_parallel)  # fewer heads than GPUs: each GPU has one
    return EngineBytes(
        weights=_weights(engine, layers, stage == 0, is_last),
        activations=_activations(engine),
        reserve=RESERVE_BYTES,
        kv_per_token=2 * kv_layers * kv_heads * engine.shape.head_dim * KV_BYTES[engine.kv_cache_dtype],
    )


def _weights(engine: Engine, layers: int, is_first: bool, is_last: bool) -> int:
    """Linear layers in their format and shared out; embedding whole, LM head shared out, both 16 bit; heads whole."""
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
    """Estimate the largest pass: the widest layer for every token, logits of every row that is sampled from.

    Inferred: in 16 bit, per token two residuals and two norms, the attention's projections, both halves of the MLP;
    logits in float32, once by the LM head, once in the sampler, and once more by each Medusa head.
    """
    shape, tp, limits = engine.shape, engine.tensor_parallel, engine.limits
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp
    mlp = 2 * shape.intermediate * shape.experts_per_token // tp
    rows = limits.max_batch_size * (limits.max_draft_len + 1)
    logits = rows * shape.vocab * 4 * (2 + engine.heads.heads)
    return limits.max_num_tokens * 2 * (4 * shape.hidden + attention + mlp) + logits


def kv_tokens(gpus: tuple[GpuBytes, ...], spec: EngineSpec) -> KvTokens:
    """Return what the caches hold: the fullest GPU decides, in whole blocks; 0 where nothing is left."""
    share = spec.draft_kv_share
    drafted = [gpu for gpu in gpus if gpu.draft]
    if not drafted:
        return KvTokens(_blocks(gpus, spec, lambda gpu: gpu.target.kv_per_token), 0)
    if not share:  # both caches see the same texts
        both = _blocks(gpus, spec, lambda gpu: gpu.target.kv_per_token + _draft_kv(gpu))
        return KvTokens(both, both)
    target = _blocks(gpus, spec, lambda gpu: gpu.target.kv_per_token / (1 - share if gpu.draft else 1))
    return KvTokens(target, _blocks(tuple(drafted), spec, lambda gpu: _draft_kv(gpu) / share))


def _blocks(gpus: tuple[GpuBytes, ...], spec: EngineSpec, bytes_per_token: Callable[[GpuBytes], float]) -> int:
    tokens = min(spec.kv_fraction * max(gpu.free, 0) / bytes_per_token(gpu) for gpu in gpus)
    return int(tokens) // spec.tokens_per_block * spec.tokens_per_block


def _draft_kv(gpu: GpuBytes) -> int:
    return gpu.draft.kv_per_token if gpu.draft else 0


def kv_fractions(gpus: tuple[GpuBytes, ...], tokens: KvTokens) -> tuple[float, float]:
    """Return kv_cache_free_gpu_mem_fraction for the target and for the draft model (0 without one).

    Rounded up: the limit in tokens that stands beside it decides. Each is a share of what is free when that engine
    makes its cache: the target, loaded first, has the GPU to itself; the draft model finds the target's cache made
    (inferred).
    """
    target = max(tokens.target * gpu.target.kv_per_token / (gpu.total - gpu.target.fixed) for gpu in gpus)
    drafts = [
        tokens.draft * _draft_kv(gpu) / (gpu.free - tokens.target * gpu.target.kv_per_token)
        for gpu in gpus
        if gpu.draft
    ]
    return _rounded(target), _rounded(max(drafts)) if drafts else 0.0


def _rounded(fraction: float) -> float:
    return math.ceil(fraction * 1000) / 1000
