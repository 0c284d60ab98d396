"""What fits: tokens in the KV caches, sequences of full length, and the refusal of what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from build.trtllm.engines import Engine, Models, engines_of
from build.trtllm.gpus import GIB, Gpu
from build.trtllm.memory import EngineBytes, GpuBytes, KvTokens, gpu_bytes, kv_tokens
from build.trtllm.modes import MODES, length_growth
from build.trtllm.spec import EngineSpec
from orchestrator.core.errors import ConfigError


@dataclass(frozen=True)
class Memory:
    """What each GPU holds, and what that leaves room for.

    largest_batch: most sequences of max_seq_len at once, were the engines built for as many.
    largest_context: most tokens for each of max_batch_size sequences, draft tokens included.
    """

    gpus: tuple[GpuBytes, ...]
    tokens: KvTokens
    largest_batch: int
    largest_context: int


def memory_of(spec: EngineSpec, gpu: Gpu, models: Models) -> Memory:
    """Work out the memory; raises ConfigError, with the arithmetic, when not even one sequence fits."""
    gpus, tokens = _caches(spec, gpu, models)
    engines = engines_of(spec, models)
    if not _full_sequences(engines, tokens, spec):
        _refuse(gpus, tokens, engines, spec)
    longest = min(_held(engines, tokens)) // spec.max_batch_size // spec.tokens_per_block * spec.tokens_per_block
    return Memory(
        gpus=gpus,
        tokens=tokens,
        largest_batch=_largest_batch(spec, gpu, models),
        largest_context=min(longest, models.target.max_positions + length_growth(spec)),
    )


def _caches(spec: EngineSpec, gpu: Gpu, models: Models) -> tuple[tuple[GpuBytes, ...], KvTokens]:
    target, *draft = engines_of(spec, models)
    gpus = gpu_bytes(target, draft[0] if draft else None, gpu.memory_gib * GIB)
    return gpus, kv_tokens(gpus, spec)


def _held(engines: tuple[Engine, ...], tokens: KvTokens) -> list[int]:
    """Return the tokens that each engine's cache holds."""
    return [tokens.target, tokens.draft][: len(engines)]


def _full_sequences(engines: tuple[Engine, ...], tokens: KvTokens, spec: EngineSpec) -> int:
    """Return how many sequences of full length all caches hold."""
    return min(held // _needed(engine, spec) for engine, held in zip(engines, _held(engines, tokens), strict=True))


def _needed(engine: Engine, spec: EngineSpec) -> int:
    """Return the tokens of one sequence of full length, in whole blocks."""
    return -(-engine.limits.engine_seq_len // spec.tokens_per_block) * spec.tokens_per_block


def _largest_batch(spec: EngineSpec, gpu: Gpu, models: Models) -> int:
    """Search the most sequences of full length; a larger batch costs activations, so room only falls with it."""
    fits, too_many = 0, MODES[spec.method].most_sequences + 1
    while too_many - fits > 1:
        batch = (fits + too_many) // 2
        tried = spec.model_copy(update={"max_batch_size": batch})
        _, tokens = _caches(tried, gpu, models)
        if _full_sequences(engines_of(tried, models), tokens, tried) >= batch:
            fits = batch
        else:
            too_many = batch
    return fits


def _refuse(gpus: tuple[GpuBytes, ...], tokens: KvTokens, engines: tuple[Engine, ...], spec: EngineSpec) -> None:
    """Say what the fullest GPU holds, what that leaves, and what one sequence needs."""
    tight = min(gpus, key=lambda gpu: gpu.free)
    rooms = [
        f"{held} of {_needed(engine, spec)} tokens of the {engine.role}, {part.kv_per_token} bytes each"
        for engine, part, held in zip(engines, _parts(tight).values(), _held(engines, tokens), strict=False)
    ]
    raise ConfigError(
        f"does not fit: GPU {tight.gpu} has {tight.total / GIB:.2f} GiB; {_sum(tight)} leave {tight.free / GIB:.2f} "
        f"GiB; the KV caches get {spec.kv_fraction:g} of it, room for {' and '.join(rooms)}, that one sequence of "
        f"max_seq_len {spec.max_seq_len} and its drafts needs (take more or larger GPUs: gpu, num_gpus; a smaller "
        "format: quantisation, kv_cache_dtype; or less: max_seq_len, max_batch_size, max_num_tokens, draft_len)"
    )


def _parts(gpu: GpuBytes) -> dict[str, EngineBytes]:
    return {"target": gpu.target} | ({"draft": gpu.draft} if gpu.draft else {})


def _sum(gpu: GpuBytes) -> str:
    return " + ".join(
        f"{role} weights {part.weights / GIB:.2f} + activations {part.activations / GIB:.2f} + "
        f"reserve {part.reserve / GIB:.2f}"
        for role, part in _parts(gpu).items()
    )
