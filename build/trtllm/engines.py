"""The engines of a plan and their sizes; it counts no bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from build.trtllm.modes import MODES, build_mode
from build.trtllm.shapes import HeadShape, ModelShape
from build.trtllm.spec import EngineSpec
from orchestrator.core.deployment.engine_manifest import EXTERNAL

#: The least --max_num_tokens when the spec does not give it: TensorRT-LLM's own default.
LEAST_NUM_TOKENS = 8192
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Limits:
    """Sizes that an engine is built for, in tokens except max_batch_size (sequences).

    max_seq_len: the flag's value. engine_seq_len: the same plus the draft tokens, which the builder adds.
    """

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    engine_seq_len: int
    max_num_tokens: int
    opt_num_tokens: int
    max_draft_len: int
    vocab_size: int
    max_beam_width: int = 1


@dataclass(frozen=True)
class Engine:
    """One engine. role: target or draft. mode: value of --speculative_decoding_mode; empty = no flag.

    quantisation: none when the weights have the type `dtype`. A draft model is on the first of the target's GPUs.
    """

    role: str
    source: str
    shape: ModelShape
    heads: HeadShape
    mode: str
    dtype: str
    quantisation: str
    kv_cache_dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    limits: Limits

    @property
    def num_ranks(self) -> int:
        """GPUs of the engine, and rank files in its folder."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def checkpoint_folder(self) -> str:
        """Where the converted checkpoint goes, below the output folder."""
        return f"checkpoints/{self.role}"

    @property
    def engine_folder(self) -> str:
        """Where the engine goes, below the output folder."""
        return f"engines/{self.role}"


@dataclass(frozen=True)
class Models:
    """The sizes of a spec's checkpoints; draft: None without a draft model."""

    target: ModelShape
    heads: HeadShape
    draft: ModelShape | None


def engines_of(spec: EngineSpec, models: Models) -> tuple[Engine, ...]:
    """Return the target's engine and, if there is a draft model, its engine."""
    target = Engine(
        role="target",
        source=spec.target,
        shape=models.target,
        heads=models.heads,
        mode=build_mode(spec.method),
        dtype=_DTYPES.get(spec.quantisation, MODES[spec.method].dtype),
        quantisation=_format(spec.quantisation),
        kv_cache_dtype=spec.kv_cache_dtype,
        tensor_parallel=spec.tensor_parallel or spec.num_gpus // spec.pipeline_parallel,
        pipeline_parallel=spec.pipeline_parallel,
        limits=target_limits(spec, models.target.vocab),
    )
    return (target, _draft_engine(spec, models.draft)) if models.draft else (target,)


def _draft_engine(spec: EngineSpec, shape: ModelShape) -> Engine:
    """Return the draft model's engine: an ordinary one, without any flag of speculation."""
    quantisation = spec.quantisation if spec.drafter_quantisation == "same" else spec.drafter_quantisation
    limits = replace(
        target_limits(spec, shape.vocab),
        engine_seq_len=spec.max_seq_len,
        max_num_tokens=max(spec.max_num_tokens or LEAST_NUM_TOKENS, spec.max_batch_size),
        opt_num_tokens=spec.max_batch_size,
        max_draft_len=0,
    )
    return Engine(
        role="draft",
        source=spec.drafter,
        shape=shape,
        heads=HeadShape(),
        mode="",
        dtype=_DTYPES.get(quantisation, "bfloat16"),
        quantisation=_format(quantisation),
        kv_cache_dtype=spec.kv_cache_dtype,
        tensor_parallel=spec.drafter_tensor_parallel,
        pipeline_parallel=1,
        limits=limits,
    )


def target_limits(spec: EngineSpec, vocab_size: int) -> Limits:
    """Return the target's sizes. Invariant: max_num_tokens >= max_batch_size * (max_draft_len + 1)."""
    tokens = spec.max_batch_size * (spec.max_draft_len + 1)
    # max_input_len is not a key of the spec: each step sends the whole text so far as its prompt, so a prompt may be
    # as long as the longest sequence. For engines that draft by themselves this happens when a text continues in
    # another process.
    is_external = build_mode(spec.method) == EXTERNAL
    return Limits(
        max_batch_size=spec.max_batch_size,
        max_input_len=spec.max_seq_len if is_external else spec.max_seq_len - 1,
        max_seq_len=spec.max_seq_len,
        engine_seq_len=spec.max_seq_len + spec.length_growth,
        max_num_tokens=max(spec.max_num_tokens or LEAST_NUM_TOKENS, tokens),
        opt_num_tokens=tokens,
        max_draft_len=spec.max_draft_len,
        vocab_size=vocab_size,
    )


def _format(quantisation: str) -> str:
    return "none" if quantisation in _DTYPES else quantisation
