"""How many tokens and sequences the KV caches hold, and the refusal of a plan that does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from build.trtllm.engines import Engine, Models, engines_of
from build.trtllm.gpus import GIB, Gpu
from build.trtllm.memory import GpuBytes, KvTokens, gpu_bytes, kv_tokens
from build.trtllm.modes import MODES, length_growth
from build.trtllm.spec import EngineSpec
from orchestrator.core.errors import ConfigError


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
        largest_context=min(longest, models.target.max_positions + length_growth(spec)),
    )


def _fit(spec: EngineSpec, gpu: Gpu, models: Models) -> _Fit:
    engines = engines_of(spec, models)
    gpus = gpu_bytes(engines[0], engines[1] if models.draft else None, gpu.memory_gib * GIB)
    return _Fit(spec, engines, gpus, kv_tokens(gpus, spec))


def _largest_batch(spec: EngineSpec, gpu: Gpu, models: Models) -> int:
    """Search the most sequences of full length; a larger batch takes more activations, so less room for them."""
    fits, too_many = 0, MODES[spec.method].most_sequences + 1
    while too_many - fits > 1:
        batch = (fits + too_many) // 2
        if _fit(spec.model_copy(update={"max_batch_size": batch}), gpu, models).num_full_sequences >= batch:
            fits = batch
        else:
            too_many = batch
    return fits


def _does_not_fit(fit: _Fit) -> ConfigError:
    """Return an error with the bytes on the fullest GPU, what they leave, and what one sequence needs."""
    tight, spec = min(fit.gpus, key=lambda gpu: gpu.free), fit.spec
    used = " + ".join(
        f"{role} weights {part.weights / GIB:.2f} + activations {part.activations / GIB:.2f} + "
        f"reserve {part.reserve / GIB:.2f}"
        for role, part in tight.parts.items()
    )
    rooms = [
        f"{held} of {needed} tokens of the {role}, {part.kv_per_token} bytes each"
        for (role, part), held, needed in zip(tight.parts.items(), fit.held, fit.needed, strict=False)
    ]
    return ConfigError(
        f"does not fit: GPU {tight.gpu} has {tight.total / GIB:.2f} GiB; {used} leave {tight.free / GIB:.2f} "
        f"GiB; the KV caches get {spec.kv_fraction:g} of it, room for {' and '.join(rooms)}, that one sequence of "
        f"max_seq_len {spec.max_seq_len} and its drafts needs (take more or larger GPUs: gpu, num_gpus; a smaller "
        "format: quantisation, kv_cache_dtype; or less: max_seq_len, max_batch_size, max_num_tokens, draft_len)"
    )
