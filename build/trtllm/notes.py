"""The notes of a plan: one or two sentences each, beside the numbers."""

from __future__ import annotations

from build.trtllm.engines import Engine
from build.trtllm.gpus import GIB
from build.trtllm.modes import EXTERNAL
from build.trtllm.shapes import model_parameters
from build.trtllm.spec import EngineSpec

#: A constant of the executor's DecodingConfig: most requests in its lookahead mode.
LOOKAHEAD_REQUESTS = 8


def notes_of(spec: EngineSpec, engines: tuple[Engine, ...], largest_batch: int) -> tuple[str, ...]:
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
    if spec.method == "lookahead" and spec.max_batch_size > LOOKAHEAD_REQUESTS:
        found.append(f"The executor has {LOOKAHEAD_REQUESTS} as a constant for most requests in its lookahead mode.")
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
