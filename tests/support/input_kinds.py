"""The kind of every input of a request, from its declaration, and the inputs that are not supported."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

from orchestrator.server.inputs import INPUTS

KINDS = {str: "text", int: "int", float: "float", bool: "bool", Any: "any"}
#: Inputs that are UINT64 tensors.
SEEDS = ("seed", "random_seed", "lora_task_id")

#: Inputs that are not supported → the values that are accepted because they ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "length_penalty": (0.0, 1.0),
    "beam_width": (0, 1),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "decoder_text_input": ("",),
    "image_input": (),
    "image_bytes_input": (),
    "image_url_input": ("",),
    "video_bytes_input": (),
    "prompt_embedding_table": (),
    "prompt_vocab_size": (0,),
    "prompt_table_extra_id": (),
    "lora_task_id": (0,),
    "lora_weights": (),
    "lora_config": (),
}


def kind_of(name: str) -> str:
    """Return text, int, float, bool, seed or any, with an s for a list."""
    return "seed" if name in SEEDS else _kind(INPUTS[name].annotation)


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is tuple:
        return f"{_kind(get_args(annotation)[0])}s"
    if get_origin(annotation) is Annotated or annotation not in KINDS:  # Annotated, or an optional value
        return _kind(get_args(annotation)[0])
    return KINDS[annotation]
