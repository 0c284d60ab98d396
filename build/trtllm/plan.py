"""From a spec to a plan: engines, commands, memory; refuses a spec that cannot be built or does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from build.trtllm.capacity import Memory, memory_of
from build.trtllm.commands import Stage, stages_of
from build.trtllm.engines import Engine, Models, engines_of
from build.trtllm.gpus import Gpu, find_gpu
from build.trtllm.memory import kv_fractions
from build.trtllm.modes import MODES, max_draft_len
from build.trtllm.notes import notes_of
from build.trtllm.rules import check_draft, check_engine_fits, check_spec, check_target
from build.trtllm.shapes import HeadShape, ModelShape, eagle_heads, medusa_heads, read_shape, redrafter_heads
from build.trtllm.spec import EngineSpec
from build.trtllm.versions import find_release
from orchestrator.deployment.engine_trees import check_tree, read_tree


@dataclass(frozen=True)
class Plan:
    """Everything that follows from a spec. servers: by role, the server's parameters in TensorRT-LLM's names."""

    spec: EngineSpec
    gpu: Gpu
    image: str
    engines: tuple[Engine, ...]
    stages: tuple[Stage, ...]
    memory: Memory
    servers: dict[str, dict[str, str]]
    notes: tuple[str, ...]


def make_plan(spec: EngineSpec) -> Plan:
    """Plan the engines of `spec`.

    Raises ConfigError: an unknown GPU, release or checkpoint, a broken rule, or too little memory.
    """
    gpu = find_gpu(spec.gpu, spec.gpu_memory_gib)
    release = find_release(spec.trtllm_version)
    check_spec(spec)
    models = _read_models(spec)
    engines = engines_of(spec, models)
    for engine in engines:
        check_engine_fits(engine, gpu)
    memory = memory_of(spec, gpu, models)
    return Plan(
        spec=spec,
        gpu=gpu,
        image=release.image,
        engines=engines,
        stages=tuple(stage for engine in engines for stage in stages_of(engine, spec)),
        memory=memory,
        servers={
            engine.role: _server(engine, spec, tokens, fraction)
            for engine, tokens, fraction in zip(
                engines,
                (memory.tokens.target, memory.tokens.draft),
                kv_fractions(memory.gpus, memory.tokens),
                strict=False,
            )
        },
        notes=notes_of(spec, engines, memory.largest_batch),
    )


def _read_models(spec: EngineSpec) -> Models:
    target = read_shape(spec.target)
    check_target(spec, target)
    draft = read_shape(spec.drafter) if MODES[spec.method].drafter == "model" else None
    if draft:
        check_draft(target, draft, spec)
    return Models(target, _read_heads(spec, target), draft)


def _read_heads(spec: EngineSpec, target: ModelShape) -> HeadShape:
    if spec.method == "medusa":
        heads = medusa_heads(spec.drafter, target, spec.medusa_heads)
        check_tree(spec.method, read_tree(spec.choices), max_draft_len(spec), {"medusa_heads": heads.heads})
        return heads
    if spec.method == "eagle":
        return eagle_heads(spec.drafter, target, spec.eagle_layers)
    if spec.method == "redrafter":
        return redrafter_heads(spec.drafter, target)
    return HeadShape()


def _server(engine: Engine, spec: EngineSpec, tokens: int, fraction: float) -> dict[str, str]:
    """Return the parameters of an engine's server; the limit in tokens holds in any order of loading."""
    parameters = {
        "max_tokens_in_paged_kv_cache": str(tokens),
        "kv_cache_free_gpu_mem_fraction": f"{fraction:.3f}",
        "enable_kv_cache_reuse": "true",
        "gpu_device_ids": ",".join(map(str, range(engine.num_ranks))),
    }
    if engine.role == "target" and (mode := MODES[spec.method].decoding_mode):
        parameters["decoding_mode"] = mode
    if engine.mode == "lookahead_decoding":
        parameters |= {
            "lookahead_window_size": str(spec.lookahead_window),
            "lookahead_ngram_size": str(spec.lookahead_ngram),
            "lookahead_verification_set_size": str(spec.lookahead_guesses),
        }
    return parameters
