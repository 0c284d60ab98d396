"""The rules of TensorRT-LLM, checked before anything is planned; each refusal is one sentence."""

from __future__ import annotations

from build.trtllm.engines import Engine
from build.trtllm.gpus import LEAST_CAPABILITY, LEAST_OF_ANY, NOT_ON_BLACKWELL, Gpu
from build.trtllm.modes import MODES
from build.trtllm.shapes import LLAMA, ModelShape
from build.trtllm.spec import EAGLE, EngineSpec
from orchestrator.core.deployment.engine_trees import check_tree, read_tree
from orchestrator.core.errors import ConfigError
from orchestrator.core.methods import METHODS

#: Weight formats with which paged context attention stays on beside an fp8 KV cache.
FP8_KV = ("fp8", "nvfp4")
BLOCK_SIZES = (8, 16, 32, 64, 128)


def check_spec(spec: EngineSpec) -> None:
    """Check the rules that need no checkpoint; raises ConfigError."""
    if not spec.target:
        raise ConfigError("target is missing: name the model to serve, a folder or a hub id (key target)")
    _check_drafter(spec)
    _check_draft_len(spec)
    _check_parallel(spec)
    _check_sizes(spec)
    allowed = MODES[spec.method].quantisations
    if allowed and spec.quantisation not in allowed:
        _refuse("quantisation", f"one of {', '.join(allowed)} for method {spec.method}", spec.quantisation)


def check_target(spec: EngineSpec, shape: ModelShape) -> None:
    """Check the spec against the target's shape; raises ConfigError."""
    if MODES[spec.method].llama_only and shape.architecture != LLAMA:
        _refuse("method", f"another for {shape.architecture}: its engines exist for {LLAMA} only", spec.method)
    if spec.max_seq_len > shape.max_positions:
        _refuse("max_seq_len", f"in 2..{shape.max_positions}, the target's longest context", spec.max_seq_len)


def check_draft(target: ModelShape, draft: ModelShape, spec: EngineSpec) -> None:
    """Check that a draft model fits its target; raises ConfigError."""
    if draft.vocab != target.vocab:
        raise ConfigError(
            f"drafter must have the target's vocabulary of {target.vocab} tokens, got {draft.vocab} "
            f"({spec.drafter}/config.json, key drafter)"
        )
    if spec.max_seq_len > draft.max_positions:
        _refuse("max_seq_len", f"in 2..{draft.max_positions}, the draft model's longest context", spec.max_seq_len)


def check_engine_fits(engine: Engine, gpu: Gpu) -> None:
    """Check that the GPUs can share the engine and have its number formats; raises ConfigError."""
    shape, tp = engine.shape, engine.tensor_parallel
    key = "tensor_parallel" if engine.role == "target" else "drafter_tensor_parallel"
    even = shape.heads % tp == 0 and shape.intermediate % tp == 0
    if not even or (shape.kv_heads % tp and tp % shape.kv_heads):
        what = f"{shape.heads} heads, {shape.kv_heads} KV heads and {shape.intermediate} MLP columns"
        _refuse(key, f"a number that divides {what} of {engine.source}", tp)
    if shape.layers % engine.pipeline_parallel:
        _refuse("pipeline_parallel", f"a number that divides {shape.layers} layers", engine.pipeline_parallel)
    if gpu.capability < LEAST_OF_ANY:
        raise ConfigError(f"{gpu.name} has compute capability {_dotted(gpu.capability)}; engines need 8.0 (key gpu)")
    # Otherwise the builder only warns, and turns off paged context attention and with it block reuse (builder.py).
    if engine.kv_cache_dtype == "fp8" and engine.quantisation not in FP8_KV:
        what = f"auto for the {engine.role}, whose weights are {engine.quantisation}; fp8 needs {' or '.join(FP8_KV)}"
        _refuse("kv_cache_dtype", what, engine.kv_cache_dtype)
    lacking = next((name for name in (engine.quantisation, engine.kv_cache_dtype) if not gpu.has_format(name)), "")
    if lacking:
        needed = "below 10.0 or above 11.9" if lacking in NOT_ON_BLACKWELL else _dotted(LEAST_CAPABILITY[lacking])
        raise ConfigError(
            f"{lacking} needs compute capability {needed}, {gpu.name} has {_dotted(gpu.capability)} "
            "(keys gpu, quantisation, kv_cache_dtype)"
        )


def _check_drafter(spec: EngineSpec) -> None:
    drafter = METHODS[spec.method].drafter
    if drafter and not spec.drafter:
        what = "a draft model" if drafter == "draft" else "the heads' checkpoint"
        raise ConfigError(f"method {spec.method!r} needs {what}, a folder or a hub id (key drafter)")
    if spec.drafter and not drafter:
        with_one = ", ".join(name for name in MODES if METHODS[name].drafter)
        _refuse("drafter", f"empty for method {spec.method} (with one: {with_one})", spec.drafter)


def _check_draft_len(spec: EngineSpec) -> None:
    mode, length = MODES[spec.method], spec.max_draft_len
    if spec.draft_len and not mode.draft_len and spec.draft_len != length:
        _refuse("draft_len", f"0 (worked out: {length}) for method {spec.method}", spec.draft_len)
    if length > mode.most_draft:
        _refuse("draft_len", f"at most {mode.most_draft} for method {spec.method}", length)
    check_tree(spec.method, read_tree(spec.choices), length, spec.model_dump())
    most = min(spec.eagle_non_leaves, length)  # checked by the library at load (runtime/eagleBuffers.cpp)
    if spec.method == "eagle2" and spec.eagle_top_k > most:
        _refuse("eagle_top_k", f"in 1..{most}, the least of eagle_non_leaves and draft_len", spec.eagle_top_k)


def _check_parallel(spec: EngineSpec) -> None:
    tensor = spec.tensor_parallel or spec.num_gpus // spec.pipeline_parallel
    if tensor * spec.pipeline_parallel != spec.num_gpus:
        raise ConfigError(
            f"tensor_parallel x pipeline_parallel must be num_gpus {spec.num_gpus}, "
            f"got {tensor} x {spec.pipeline_parallel} (keys num_gpus, tensor_parallel, pipeline_parallel)"
        )
    if spec.drafter_tensor_parallel > spec.num_gpus:
        _refuse("drafter_tensor_parallel", f"in 1..{spec.num_gpus} (num_gpus)", spec.drafter_tensor_parallel)
    # ReDrafter's conversion has no --pp_size, EAGLE's asserts that it is 1.
    if spec.method in ("redrafter", *EAGLE) and spec.pipeline_parallel > 1:
        _refuse("pipeline_parallel", f"1 for method {spec.method}", spec.pipeline_parallel)


def _check_sizes(spec: EngineSpec) -> None:
    if spec.tokens_per_block not in BLOCK_SIZES:
        _refuse("tokens_per_block", f"one of {', '.join(map(str, BLOCK_SIZES))}", spec.tokens_per_block)
    if spec.eagle_posterior and spec.method not in EAGLE:
        _refuse("eagle_posterior", f"0 for method {spec.method}", spec.eagle_posterior)
    most = MODES[spec.method].most_sequences
    if spec.max_batch_size > most:
        _refuse("max_batch_size", f"in 1..{most} for method {spec.method}", spec.max_batch_size)
    tokens = spec.max_batch_size * (spec.max_draft_len + 1)
    if spec.max_num_tokens and spec.max_num_tokens < tokens:
        sizes = f"max_batch_size {spec.max_batch_size} x (max_draft_len {spec.max_draft_len} + 1)"
        _refuse("max_num_tokens", f"0 (worked out) or at least {tokens} = {sizes}", spec.max_num_tokens)


def _refuse(key: str, allowed: str, value: object) -> None:
    raise ConfigError(f"{key} must be {allowed}, got {value} (key {key})")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
