"""A plan as text for people and as JSON for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from pydantic import TypeAdapter

from build.trtllm.engines import Engine
from build.trtllm.gpus import GIB
from build.trtllm.memory import EngineBytes
from build.trtllm.plan import Plan

_PLAN = TypeAdapter(Plan)


def plan_json(plan: Plan) -> str:
    """Return the plan as JSON."""
    return json.dumps(_PLAN.dump_python(plan), indent=1) + "\n"


def plan_text(plan: Plan) -> str:
    """Return the plan for reading: engines, memory, server parameters, commands, notes."""
    return "\n".join(_lines(plan)) + "\n"


def command_line(argv: tuple[str, ...]) -> str:
    """Return the words of a command as a shell would take them, a flag with its value on each line."""
    words = " ".join(shlex.quote(word) for word in argv)
    return words.replace(" --", " \\\n    --")


def _lines(plan: Plan) -> Iterator[str]:
    spec = plan.spec
    plural = "s" if spec.num_gpus > 1 else ""
    yield f"{spec.method} on {spec.num_gpus} GPU{plural} {plan.gpu.name}, TensorRT-LLM {spec.trtllm_version}"
    yield f"container {plan.image}"
    for engine in plan.engines:
        yield ""
        yield from _engine(engine)
    yield ""
    yield from _memory(plan)
    for role, parameters in plan.servers.items():
        yield ""
        yield f"server parameters of the {role}"
        yield from (f"  {name} = {value}" for name, value in parameters.items())
    for stage in plan.stages:
        yield ""
        yield f"stage {stage.name} -> {stage.output}"
        yield f"  {command_line(stage.argv)}"
    yield ""
    yield from (f"note: {note}" for note in plan.notes)


def _engine(engine: Engine) -> Iterator[str]:
    shape, limits = engine.shape, engine.limits
    yield f"{engine.role} {engine.source} ({shape.architecture}) -> {engine.engine_folder}"
    yield (
        f"  {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, {shape.kv_heads} KV heads of "
        f"{shape.head_dim}, MLP {shape.intermediate}, vocabulary {shape.vocab}"
    )
    yield (
        f"  weights {engine.dtype if engine.quantisation == 'none' else engine.quantisation}, KV cache "
        f"{engine.dtype if engine.kv_cache_dtype == 'auto' else engine.kv_cache_dtype}, "
        f"{engine.tensor_parallel} x {engine.pipeline_parallel} GPUs (tensor x pipeline)"
    )
    yield (
        f"  mode {engine.mode or 'none'}: {limits.max_draft_len} draft tokens, batch {limits.max_batch_size}, "
        f"{limits.max_seq_len} tokens each ({limits.engine_seq_len} with drafts), {limits.max_num_tokens} a pass"
    )


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield f"{'memory in GiB':<18}{'weights':>9}{'activations':>13}{'reserve':>9}{'KV cache':>10}{'bytes/token':>13}"
    tokens = {"target": memory.tokens.target, "draft": memory.tokens.draft}
    for gpu in memory.gpus:
        for role, part in gpu.parts.items():
            yield _row(f"GPU {gpu.gpu} {role}", part, tokens[role])
        kv = sum(tokens[role] * part.kv_per_token for role, part in gpu.parts.items())
        yield f"  total {gpu.total / GIB:.2f}, not used {(gpu.free - kv) / GIB:.2f}"
    drafts = f", of the draft model {memory.tokens.draft}" if memory.tokens.draft else ""
    yield f"KV cache of the target: {memory.tokens.target} tokens{drafts}"
    yield f"largest batch of full-length sequences: {memory.largest_batch}"
    yield f"largest context at batch {plan.spec.max_batch_size}: {memory.largest_context} tokens each"


def _row(name: str, part: EngineBytes, tokens: int) -> str:
    gib = [part.weights / GIB, part.activations / GIB, part.reserve / GIB, tokens * part.kv_per_token / GIB]
    weights, activations, reserve, kv = (f"{value:.2f}" for value in gib)
    return f"{name:<18}{weights:>9}{activations:>13}{reserve:>9}{kv:>10}{part.kv_per_token:>13}"
