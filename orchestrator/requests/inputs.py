"""A client's request: every input by name, read, checked and turned into what the loop needs; knows no Triton.

Names and neutral values are those of TensorRT-LLM's BLS model, ours beside them (docs/protocol.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.errors import RequestError, shown, unknown_name

MAX_TEXT_BYTES = 4 << 20
MAX_WORDS = 64
MAX_WORD_BYTES = 1024
MAX_SALT_BYTES = 1024

# Triton's own request parameters, which are none of a client's options.
RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers",
     "binary_data_output", "binary_data", "id", "model_name", "model_version"}
)  # fmt: skip


class Input(NamedTuple):
    """kind: how it is read. neutral: for an input that is not supported yet, the values that ask for nothing."""

    kind: str
    neutral: tuple[Any, ...] | None = None


INPUTS: Mapping[str, Input] = {
    # what is generated from
    "text_input": Input("text"),
    "input_ids": Input("ints"),
    "cache_salt": Input("text"),
    # when it ends
    "max_tokens": Input("int"),
    "end_id": Input("int"),
    "stop_ids": Input("ints"),
    "stop_words": Input("texts"),
    "timeout_ms": Input("int"),
    "ignore_eos": Input("bool"),
    "min_tokens": Input("int"),
    "min_length": Input("int"),
    # which token comes next
    "temperature": Input("float"),
    "top_k": Input("int"),
    "top_p": Input("float"),
    "min_p": Input("float"),
    "typical_p": Input("float"),
    "repetition_penalty": Input("float"),
    "presence_penalty": Input("float"),
    "frequency_penalty": Input("float"),
    "logit_bias_ids": Input("ints"),
    "logit_bias_weights": Input("floats"),
    "embedding_bias_words": Input("texts"),
    "embedding_bias_weights": Input("floats"),
    "bad_words": Input("texts"),
    "allowed_token_ids": Input("ints"),
    "guided_decoding_guide_type": Input("text"),
    "guided_decoding_guide": Input("text"),
    "seed": Input("seed"),
    "random_seed": Input("seed"),
    # how it is drafted
    "speculation": Input("text"),
    "speculation_config": Input("text"),
    "num_draft_tokens": Input("int"),
    "rule": Input("text"),
    "typical_epsilon": Input("float"),
    "typical_delta": Input("float"),
    "use_draft_logits": Input("bool"),
    "draft_text": Input("text"),
    "draft_input_ids": Input("ints"),
    # what comes back
    "stream": Input("bool"),
    "exclude_input_in_output": Input("bool"),
    "num_return_sequences": Input("int"),
    "return_log_probs": Input("bool"),
    "num_top_log_probs": Input("int"),
    "return_stats": Input("bool"),
    "return_steps": Input("bool"),
    "return_num_input_tokens": Input("bool"),
    "return_num_output_tokens": Input("bool"),
    # accepted when they ask for nothing
    "pad_id": Input("any"),
    "length_penalty": Input("float", (0.0, 1.0)),
    "beam_width": Input("int", (0, 1)),
    "return_context_logits": Input("bool", (False,)),
    "return_generation_logits": Input("bool", (False,)),
    "return_perf_metrics": Input("bool", (False,)),
    "decoder_text_input": Input("text", ("",)),
    "image_input": Input("any", ()),
    "image_bytes_input": Input("any", ()),
    "image_url_input": Input("text", ("",)),
    "video_bytes_input": Input("any", ()),
    "prompt_embedding_table": Input("any", ()),
    "prompt_vocab_size": Input("int", (0,)),
    "prompt_table_extra_id": Input("any", ()),
    "lora_task_id": Input("seed", (0,)),
    "lora_weights": Input("any", ()),
    "lora_config": Input("any", ()),
}


@dataclass(frozen=True)
class RequestInputs:
    """The inputs that a client set, as Python values by name."""

    values: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an input's value, or the default when it was not set."""
        return self.values.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self.values


def read(tensors: Mapping[str, npt.NDArray[Any]], parameters: str) -> RequestInputs:
    """Read a request's tensors and its parameters (JSON; over /generate undeclared keys land there).

    Raises RequestError for an unknown name, a value that cannot be read, and an unsupported option.
    """
    values = {name: _from_tensor(name, tensor) for name, tensor in tensors.items()}
    for name, value in _parameters(parameters).items():
        values.setdefault(name, _from_json(name, value))
    for name, value in values.items():
        _refuse_unsupported(name, value)
    return RequestInputs(values)


def _parameters(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text) if text else {}
    for name in list(found):
        if name in RESERVED or name.startswith("triton_"):
            del found[name]
        elif name not in INPUTS:
            raise RequestError(unknown_name("parameter", name, INPUTS, "request parameters"))
    return found


def _from_tensor(name: str, tensor: npt.NDArray[Any]) -> Any:
    kind = INPUTS[name].kind
    if kind in ("texts", "ints", "floats"):
        values = [_scalar(name, kind[:-1], value) for value in tensor.reshape(-1).tolist()]
        return [v for v in values if v != ""] if kind == "texts" else values
    if kind == "any":
        return tensor
    if tensor.size != 1:
        raise RequestError(f"{name} must hold one value, got {tensor.size} (input {name})")
    return _scalar(name, kind, tensor.reshape(-1).tolist()[0])


def _from_json(name: str, value: Any) -> Any:
    kind = INPUTS[name].kind
    if kind in ("texts", "ints", "floats"):
        items = value if isinstance(value, list) else [value]
        return [s for item in items if (s := _scalar(name, kind[:-1], item)) != ""]
    return value if kind == "any" else _scalar(name, kind, value)


def _scalar(name: str, kind: str, value: Any) -> Any:
    """Return `value` as its kind has it; raises RequestError when it is none."""
    if kind == "text":
        return _text(name, value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind in ("int", "seed") and type(value) is int:
        return value
    if kind == "float" and type(value) in (int, float):
        return _float32(value)
    words = {"bool": "true or false", "int": "a whole number", "seed": "a whole number ≥ 0"}
    raise RequestError(f"{name} must be {words.get(kind, 'a number')}, got {shown(value)} (input {name})")


def _float32(value: float) -> float:
    """Return the number that an FP32 tensor would have brought, so that every door gives the same p."""
    if abs(value) >= 1e39:
        return math.inf if value > 0 else -math.inf
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")  # half a surrogate pair is refused as bytes are
    if not isinstance(value, bytes):
        raise RequestError(f"{name} must be text, got {shown(value)} (input {name})")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} must be UTF-8, byte {error.start} is not (input {name})") from None


def _refuse_unsupported(name: str, value: Any) -> None:
    neutral = INPUTS[name].neutral
    if neutral is None or (isinstance(value, list) and not value):
        return
    if isinstance(value, np.ndarray) and not value.size:
        return
    if isinstance(value, (list, np.ndarray)) or value not in neutral:
        got = "a value" if isinstance(value, np.ndarray) else shown(value)
        allowed = f"; allowed: {', '.join(map(repr, neutral))}" if neutral else ""
        raise RequestError(f"{name} is not supported yet, got {got}{allowed} (input {name})")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise RequestError unless low ≤ value ≤ high; NaN never is."""
    if not low <= value <= high:
        allowed, got = f"{_exact(low)}..{_exact(high)}", _exact(value)
        raise RequestError(f"{name} must be in {allowed}, got {got} (input {name})")


def _exact(value: float) -> str:
    """Word a number so that one beyond a limit does not look like the limit; float32 has 8 digits."""
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raise RequestError when an id is none of the vocabulary's."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{name} must hold ids in 0..{vocab_size - 1}, got {token} (input {name})")


def check_size(name: str, text: str, max_bytes: int) -> None:
    """Raise RequestError when a text is too long."""
    if (size := len(text.encode())) > max_bytes:
        raise RequestError(f"{name} has {size} bytes, at most {max_bytes} allowed (input {name})")


def check_words(name: str, words: list[str]) -> None:
    """Raise RequestError when a word list is too long to be searched for at every step."""
    if len(words) > MAX_WORDS:
        raise RequestError(f"{name} has {len(words)} entries, at most {MAX_WORDS} allowed (input {name})")
    for word in words:
        if len(word.encode()) > MAX_WORD_BYTES:
            raise RequestError(
                f"{name} has an entry of {len(word.encode())} bytes, at most {MAX_WORD_BYTES} allowed (input {name})"
            )
