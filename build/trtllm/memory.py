"""Bytes of engines on GPUs, the tokens that the KV caches hold beside them, and the refusal of what does not fit.

Weights and KV caches are counted; the bytes of activations and of the runtime are estimates (docs/tensorrt-llm.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from build.trtllm.engines import Engine, Models, engines_of
from build.trtllm.gpus import GIB, Gpu
from build.trtllm.modes import MODES
from build.trtllm.spec import EngineSpec
from orchestrator.core.errors import ConfigError

#: Bits of a linear layer's weight; block formats include the scales of their blocks: 16 bits for 128 weights
#: (int4_awq), 8 bits for 16 weights (nvfp4).
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
    """Return the bytes on each of the target's GPUs; total: of one GPU. A draft model is on the first ones."""
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
    """Return the bytes of one rank of an engine; the ranks of one pipeline stage are consecutive."""
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
    whole on each rank of their stage. Everything but the linear layers has 16 bits.
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
    """Return how many tokens the caches hold on the fullest GPU, in whole blocks; 0 when no memory is left."""
    share = spec.draft_kv_share
    with_draft = tuple(gpu for gpu in gpus if gpu.draft)
    if not share or not with_draft:  # both caches hold the same texts
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

    Both are rounded up: the limit in tokens, which is also set, then decides. Inferred: each is a share of the memory
    that is free when its engine allocates its cache. The target is loaded first, on an empty GPU; the draft model is
    loaded when the target's cache is already allocated.
    """
    target = max(tokens.target * gpu.target.kv_per_token / (gpu.total - gpu.target.fixed) for gpu in gpus)
    drafts = [
        tokens.draft * _draft_kv(gpu) / (gpu.free - tokens.target * gpu.target.kv_per_token)
        for gpu in gpus
        if gpu.draft
    ]
    return math.ceil(target * 1000) / 1000, math.ceil(max(drafts, default=0.0) * 1000) / 1000


@dataclass(frozen=True)
class Memory:
    """The bytes on each GPU, and what fits beside them.

    largest_batch: most sequences of max_seq_len at once, if the engines were built for as many.
    largest_context: most tokens for each of max_batch_size sequences, draft tokens included.
    """

    gpus: tuple[GpuBytes, ...]
    tokens: KvTokens
    largest_batch: int
    largest_context: int


@dataclass(frozen=True)
class _Fit:
    """A plan's engines, the bytes on each GPU, and the tokens that the caches hold."""

    spec: EngineSpec
    engines: tuple[Engine, ...]
    gpus: tuple[GpuBytes, ...]
    tokens: KvTokens

    @property
    def held(self) -> list[int]:
        """The tokens that each engine's cache holds."""
        return [self.tokens.target, self.tokens.draft][: len(self.engines)]

    @property
    def needed(self) -> list[int]:
        """The tokens of one sequence of full length in each engine's cache, in whole blocks."""
        size = self.spec.tokens_per_block
        return [-(-engine.limits.engine_seq_len // size) * size for engine in self.engines]

    @property
    def num_full_sequences(self) -> int:
        """How many sequences of full length all caches hold."""
        return min(held // needed for held, needed in zip(self.held, self.needed, strict=True))


def memory_of(spec: EngineSpec, gpu: Gpu, models: Models) -> Memory:
    """Return the memory of a plan; raises ConfigError, with the arithmetic, when not even one sequence fits."""
    fit = _fit(spec, gpu, models)
    if not fit.num_full_sequences:
        raise _does_not_fit(fit)
    longest = min(fit.held) // spec.max_batch_size // spec.tokens_per_block * spec.tokens_per_block
    return Memory(
        gpus=fit.gpus,
        tokens=fit.tokens,
        largest_batch=_largest_batch(spec, gpu, models),
        largest_context=min(longest, models.target.max_positions + spec.length_growth),
    )


def _fit(spec: EngineSpec, gpu: Gpu, models: Models) -> _Fit:
    engines = engines_of(spec, models)
    gpus = gpu_bytes(engines[0], engines[1] if models.draft else None, gpu.memory_gib * GIB)
    return _Fit(spec, engines, gpus, kv_tokens(gpus, spec))


def _largest_batch(spec: EngineSpec, gpu: Gpu, models: Models) -> int:
    """Search for the most sequences of full length; a larger batch has larger activations, which leave less for KV."""
    fits, too_many = 0, MODES[spec.method].most_sequences + 1
    while too_many - fits > 1:
        batch = (fits + too_many) // 2
        if _fit(spec.model_copy(update={"max_batch_size": batch}), gpu, models).num_full_sequences >= batch:
            fits = batch
        else:
            too_many = batch
    return fits


def _does_not_fit(fit: _Fit) -> ConfigError:
    """Return an error that states the bytes on the fullest GPU, what they leave, and what one sequence needs."""
    fullest, spec = min(fit.gpus, key=lambda gpu: gpu.free), fit.spec
    used = " + ".join(
        f"{role} weights {part.weights / GIB:.2f} + activations {part.activations / GIB:.2f} + "
        f"reserve {part.reserve / GIB:.2f}"
        for role, part in fullest.parts.items()
    )
    rooms = [
        f"{held} of {needed} tokens of the {role}, {part.kv_per_token} bytes each"
        for (role, part), held, needed in zip(fullest.parts.items(), fit.held, fit.needed, strict=False)
    ]
    return ConfigError(
        f"does not fit: GPU {fullest.gpu} has {fullest.total / GIB:.2f} GiB; {used} leave {fullest.free / GIB:.2f} "
        f"GiB; the KV caches get {spec.kv_fraction:g} of it, room for {' and '.join(rooms)}, that one sequence of "
        f"max_seq_len {spec.max_seq_len} and its drafts needs (take more or larger GPUs: gpu, num_gpus; a smaller "
        "format: quantisation, kv_cache_dtype; or less: max_seq_len, max_batch_size, max_num_tokens, draft_len)"
    )
