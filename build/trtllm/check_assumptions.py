"""What this repository assumes about TensorRT-LLM, and the words in a log that show an assumption to be wrong."""

from __future__ import annotations

import re

#: (what the log would say: a pattern, the assumption, where it is made)
_BY_WORDS = (
    (r"unrecognized arguments|invalid choice|error: argument", "flags of a command", "build/trtllm/commands.py"),
    (r"has lost rope_(scaling|parameters)", "the converter keeps rotary positions", "build/trtllm/builder.py"),
    (r"is not on PATH|does not exist: run this|has no package", "tools and folders of the container", "docs/docker.md"),
    (r"incompatible (constructor|function) arguments", "argument names of the bindings", "runtime/trtllm/executor/"),
    (r"DecodingMode is not set", "the decoding mode beside its configuration", "runtime/trtllm/executor/library.py"),
    (
        r"block reuse must be enabled",
        "block reuse of engines with external drafts",
        "runtime/trtllm/executor/library.py",
    ),
    (r"[Cc]hunked [Cc]ontext requires", "chunked context of every engine", "runtime/trtllm/executor/library.py"),
    (
        r"Eagle-tree depth|larger maxPathLen|Eagle choices",
        "shape of trees",
        "orchestrator/core/deployment/engine_trees.py",
    ),
    (
        r"Prompt length .* exceeds|must be less than max sequence length",
        "lengths",
        "runtime/trtllm/executor/adapters.py",
    ),
    (r"exceeds maximum draft tokens length", "length of drafts", "runtime/trtllm/executor/adapters.py"),
    (r"draft.?[Ll]ogits", "shape and type of draft probabilities", "runtime/trtllm/executor/adapters.py"),
    (r"which are not the \d+ of the input", "a result begins with its input", "runtime/trtllm/adapter.py"),
    (r"logits of shape", "shape of generation_logits", "runtime/trtllm/executor/adapters.py"),
    (r"ended the request without a token", "a request is answered by tokens", "runtime/trtllm/adapter.py"),
    (r"out of memory|OutOfMemory", "the memory arithmetic of the plan", "build/trtllm/memory.py"),
    (r"differs from the torch engine's", "greedy text is the target's", "docs/numerics.md"),
    (r"does not fit: GPU", "the smallest engines fit the GPU", "build/trtllm/memory.py"),
)
_TORCH_ALONE = ("heads", "torch")
_BY_STAGE = {
    "heads": "heads can be trained for this target on this device (build/README.md)",
    "plan": "the planner reads these checkpoints (build/trtllm/shapes.py)",
    "build": "the converters and trtllm-build run with these flags (build/trtllm/commands.py)",
    "torch": "the torch engine runs the checkpoint in float32 on this device (docs/numerics.md)",
    "engine": "the engine loads and answers through the executor (runtime/trtllm/executor/)",
    "compare": "greedy text is the target's (docs/losslessness.md)",
}


def assumption_of(stage: str, log: str) -> str:
    """Return the assumption that a stage's log contradicts: by its words, else by its stage.

    The words are TensorRT-LLM's and the plan's; in a stage that runs torch alone they would mean something else.
    """
    for pattern, what, where in _BY_WORDS:
        if stage not in _TORCH_ALONE and re.search(pattern, log):
            return f"{what} ({where})"
    return _BY_STAGE[stage]
