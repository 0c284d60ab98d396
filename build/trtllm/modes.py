"""What TensorRT-LLM allows each drafting method in a compiled engine; it opens no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.deployment.engine_manifest import EXTERNAL
from orchestrator.core.deployment.engine_trees import LOOKAHEAD_REQUESTS
from orchestrator.core.errors import ConfigError, unknown_name
from orchestrator.core.methods import METHODS
from orchestrator.drafting.registry import load

#: The most draft nodes that the server sends; inferred as the limit where TensorRT-LLM states none.
MOST_NODES = 128
SIXTEEN_BIT = ("none", "bf16", "fp16")


@dataclass(frozen=True)
class Mode:
    """The limits of one method. draft_len: default of the key draft_len; 0 when the length is computed.

    quantisations: those allowed, () for all. dtype: the weights' type when quantisation is none.
    """

    draft_len: int = 0
    most_draft: int = MOST_NODES
    most_sequences: int = 2048
    llama_only: bool = False
    quantisations: tuple[str, ...] = ()
    dtype: str = "bfloat16"


def _proposed_len(method: str) -> int:
    """Return how many tokens the server's proposer of a method drafts unless a request says otherwise."""
    length: int = load(METHODS[method].config).model_fields["draft_len"].default
    return length


_EAGLE = Mode(63, 256, 512, llama_only=True, quantisations=SIXTEEN_BIT, dtype="float16")
MODES = {
    "none": Mode(),
    **{name: Mode(_proposed_len(name)) for name in ("draft_model", "prompt_lookup", "ngram", "suffix", "predicted")},
    # int4_awq is inferred: the documentation says fp16, fp8 and weights only.
    "medusa": Mode(63, llama_only=True, quantisations=("none", "fp16", "fp8", "int4_awq"), dtype="float16"),
    # Inferred: EAGLE's conversion has no flag for another format.
    "eagle": _EAGLE,
    "eagle2": _EAGLE,
    # Its conversion adds the heads to a base that has already been converted or quantised.
    "redrafter": Mode(dtype="float16"),
    "lookahead": Mode(most_sequences=LOOKAHEAD_REQUESTS),
}

#: Methods of the server that no compiled engine can run.
REFUSED = {
    "jacobi": "it drafts from the target tokens, which an engine does not return",
    "eagle3": "only TensorRT-LLM's PyTorch backend runs it",
    "recycling": "it drafts from the target's most probable tokens at each node, which an engine does not return",
    "auto": "the engine of any other method serves it: of suffix, for example, with the chains of this server",
}


def check_method(method: str, where: str) -> None:
    """Raise ConfigError, with the reason, for a method that has no compiled engine."""
    if method in REFUSED:
        raise ConfigError(f"method {method!r} has no compiled engine: {REFUSED[method]} ({where})")
    if method not in MODES:
        raise ConfigError(unknown_name("method", method, MODES, where))


def build_mode(method: str) -> str:
    """Return the value of --speculative_decoding_mode for the target's engine; empty for an engine without drafts."""
    return "" if method == "none" else METHODS[method].build_mode or EXTERNAL
