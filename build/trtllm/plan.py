"""From a spec to a plan: engines, commands, memory; refuses a spec that cannot be built or does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from build.trtllm.commands import Stage, stages_of
from build.trtllm.engines import Engine, Models, engines_of
from build.trtllm.gpus import GIB, Gpu, find_gpu
from build.trtllm.memory import Memory, kv_fractions, memory_of
from build.trtllm.rules import check_draft, check_engine_fits, check_spec, check_target
from build.trtllm.shapes import (
    HeadShape,
    ModelShape,
    eagle_heads,
    medusa_heads,
    model_parameters,
    read_shape,
    redrafter_heads,
)
from build.trtllm.spec import EAGLE, EngineSpec
from build.trtllm.versions import find_release
from orchestrator.core.deployment.engine_manifest import EXTERNAL
from orchestrator.core.deployment.engine_trees import check_tree, read_tree
from orchestrator.core.methods import METHODS


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

    Raises ConfigError for an unknown GPU, release or checkpoint, a broken rule, or too little memory.
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
        notes=_notes(spec, engines, memory.largest_batch),
    )


def _read_models(spec: EngineSpec) -> Models:
    target = read_shape(spec.target)
    check_target(spec, target)
    draft = read_shape(spec.drafter) if METHODS[spec.method].drafter == "draft" else None
    if draft:
        check_draft(target, draft, spec)
    return Models(target, _read_heads(spec, target), draft)


def _read_heads(spec: EngineSpec, target: ModelShape) -> HeadShape:
    if spec.method == "medusa":
        heads = medusa_heads(spec.drafter, target, spec.medusa_heads)
        check_tree(spec.method, read_tree(spec.choices), spec.max_draft_len, {"medusa_heads": heads.heads})
        return heads
    if spec.method in EAGLE:
        return eagle_heads(spec.drafter, target, spec.eagle_layers)
    if spec.method == "redrafter":
        return redrafter_heads(spec.drafter, target)
    return HeadShape()


def _server(engine: Engine, spec: EngineSpec, tokens: int, fraction: float) -> dict[str, str]:
    """Return the parameters of an engine's server; the limit in tokens holds in any loading order."""
    parameters = {
        "max_tokens_in_paged_kv_cache": str(tokens),
        "kv_cache_free_gpu_mem_fraction": f"{fraction:.3f}",
        "enable_kv_cache_reuse": "true",
        # Off by default, and then a prompt longer than max_num_tokens fails; a step's prompt is the whole text.
        "enable_chunked_context": "true",
        "gpu_device_ids": ",".join(map(str, range(engine.num_ranks))),
    }
    if engine.role == "target" and METHODS[spec.method].build_mode:  # modes are named as our methods are
        parameters["decoding_mode"] = "eagle" if spec.method in EAGLE else spec.method
    if spec.method == "lookahead":
        parameters |= {
            "lookahead_window_size": str(spec.lookahead_window),
            "lookahead_ngram_size": str(spec.lookahead_ngram),
            "lookahead_verification_set_size": str(spec.lookahead_guesses),
        }
    return parameters


def _notes(spec: EngineSpec, engines: tuple[Engine, ...], largest_batch: int) -> tuple[str, ...]:
    """Return the notes that apply."""
    target, *draft = engines
    found = [
        f"Converting the {engine.role} loads its 16-bit weights: "
        f"{2 * (model_parameters(engine.shape) + engine.heads.parameters) / GIB:.1f} GiB of GPU or host memory."
        for engine in engines
    ]
    if largest_batch < spec.max_batch_size:
        found.append(
            f"The KV cache holds {largest_batch} sequences of full length at once, not max_batch_size "
            f"{spec.max_batch_size}: more run only while they are shorter."
        )
    if target.mode == EXTERNAL:
        found.append(
            f"The target takes up to {target.limits.max_draft_len} draft tokens a request and step, from whatever "
            "drafts them; a chain, no tree."
        )
    found += [_sharing(target, engine) for engine in draft]
    if spec.method == "lookahead":
        found.append(
            f"Lookahead needs the kernels called XQA for heads of {target.shape.head_dim}; which sizes have them is "
            "not established."
        )
    if spec.method == "medusa":
        found.append("The server's medusa_choices must name every node of the tree, not only the leaves' paths.")
    return tuple(found)


def _sharing(target: Engine, draft: Engine) -> str:
    if draft.num_ranks != target.num_ranks:
        return (
            f"The draft model runs on {draft.num_ranks} of {target.num_ranks} GPUs: this needs the server's "
            "orchestrator mode and gpu_device_ids (a single node)."
        )
    if target.num_ranks > 1:
        return "Two engines on the same several GPUs in leader mode: users report hangs (TensorRT-LLM#3499)."
    return "Both engines share the GPU: load the target first, its share of the memory is worked out for that."
