"""How each drafting method runs on an engine: build mode, draft length, limits; opens no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.core.errors import ConfigError, unknown_name
from orchestrator.deployment.engine_trees import lookahead_nodes, read_tree

if TYPE_CHECKING:
    from build.trtllm.spec import EngineSpec

EXTERNAL = "draft_tokens_external"
#: The most draft nodes that the server sends; inferred as the limit where TensorRT-LLM states none.
MOST_NODES = 128
MOST_SEQUENCES = 2048
SIXTEEN_BIT = ("none", "bf16", "fp16")


@dataclass(frozen=True)
class Mode:
    """flag: value of --speculative_decoding_mode, empty for none. decoding_mode: the executor's name for it.

    drafter: what the key drafter names: empty for nothing, "model" (an engine of its own) or "heads" (in the target's).
    draft_len: default of the key draft_len; 0 when the length is computed. quantisations: those allowed, () for all.
    dtype: the weights' type when quantisation is none.
    """

    flag: str = EXTERNAL
    decoding_mode: str = ""
    drafter: str = ""
    draft_len: int = 0
    most_draft: int = MOST_NODES
    most_sequences: int = MOST_SEQUENCES
    llama_only: bool = False
    quantisations: tuple[str, ...] = ()
    dtype: str = "bfloat16"


MODES = {
    "none": Mode(flag=""),
    "draft_model": Mode(drafter="model", draft_len=5),
    # The lengths are our proposers' defaults.
    "prompt_lookup": Mode(draft_len=10),
    "ngram": Mode(draft_len=2),
    "suffix": Mode(draft_len=32),
    "predicted": Mode(draft_len=16),
    "medusa": Mode(
        flag="medusa",
        decoding_mode="medusa",
        drafter="heads",
        draft_len=63,
        llama_only=True,
        # int4_awq is inferred: the documentation says fp16, fp8 and weights only.
        quantisations=("none", "fp16", "fp8", "int4_awq"),
        dtype="float16",
    ),
    "eagle": Mode(
        flag="eagle",
        decoding_mode="eagle",
        drafter="heads",
        draft_len=63,
        most_draft=256,
        most_sequences=512,
        llama_only=True,
        # Inferred: its conversion script has no flag for another format, nor has ReDrafter's.
        quantisations=SIXTEEN_BIT,
        dtype="float16",
    ),
    "redrafter": Mode(
        flag="explicit_draft_tokens",
        decoding_mode="redrafter",
        drafter="heads",
        quantisations=SIXTEEN_BIT,
        dtype="float16",
    ),
    "lookahead": Mode(flag="lookahead_decoding", decoding_mode="lookahead"),
}

#: Methods of the server that no compiled engine can run.
REFUSED = {
    "jacobi": "it drafts from the target tokens, which an engine does not return",
    "eagle2": "its dynamic tree cannot be set through Triton, only EAGLE-1's static one (method eagle)",
    "eagle3": "only TensorRT-LLM's PyTorch backend runs it",
}


def find_mode(method: str, where: str) -> Mode:
    """Return how `method` runs on an engine; raises ConfigError, with the reason, for a method that does not."""
    if method in REFUSED:
        raise ConfigError(f"method {method!r} has no compiled engine: {REFUSED[method]} ({where})")
    if method not in MODES:
        raise ConfigError(unknown_name("method", method, MODES, where))
    return MODES[method]


def max_draft_len(spec: EngineSpec) -> int:
    """Return the most draft tokens a step for the target's engine; 0 for the method none."""
    if spec.method == "lookahead":
        return lookahead_nodes(spec.lookahead_window, spec.lookahead_ngram, spec.lookahead_guesses)
    if spec.method == "redrafter":
        return spec.redrafter_beams * spec.redrafter_beam_len
    default = MODES[spec.method].draft_len
    return (spec.draft_len or len(read_tree(spec.choices)) or default) if default else 0


def length_growth(spec: EngineSpec) -> int:
    """Return by how many tokens the builder lengthens max_seq_len: the drafts, and EAGLE's layers."""
    return max_draft_len(spec) + (spec.eagle_layers if spec.method == "eagle" else 0)
