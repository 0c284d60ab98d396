"""The inputs of a client's request, each declared by name, read and checked; knows nothing of Triton.

Names and neutral values are those of TensorRT-LLM's BLS model, plus our own (docs/protocol.md). Limits that depend on
the deployment or on another input are checked in `request_builder` and `sampling_inputs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, get_origin

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationInfo,
)

from orchestrator.core.declarations import Declaration, fields_of, json_object, validate
from orchestrator.core.errors import RequestError, abbreviated
from orchestrator.core.grammar import MAX_GUIDE_BYTES
from orchestrator.core.sampling_params import DELTA, as_float32

MAX_TEXT_BYTES = 4 << 20
MAX_CONFIG_BYTES = 65_536
MAX_SALT_BYTES = 1024
MAX_NAME_BYTES = 1024
MAX_PARAMETERS_BYTES = 8 << 20
MAX_IDS = 1 << 20
MAX_STOP_IDS = 256
MAX_WORDS = 64
# The entries of a word list, including the empty ones with which clients pad a tensor.
MAX_WORD_ENTRIES = 1024
MAX_BIASED = 1024
MAX_WORD_BYTES = 1024
MAX_TIMEOUT_MS = 86_400_000
MAX_TOP = 20
MAX_SEQUENCES = 16
MAX_SEQUENCE_INDEX = 1023
MAX_PRIORITY = 10
MAX_PENALTY = 100
# Rounded to float32, as every number of a request is.
MIN_PENALTY = float(np.float32(0.01))
MAX_WEIGHT = 1000

# Request parameters of Triton itself, which arrive together with a client's options.
RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "timeout", "headers",
     "binary_data_output", "binary_data", "id", "model_name", "model_version"}
)  # fmt: skip


def text(max_bytes: int = MAX_TEXT_BYTES) -> BeforeValidator:
    """Declare a text, which is bytes in a tensor: valid UTF-8 of at most `max_bytes` bytes."""

    def read(value: Any, info: ValidationInfo) -> Any:
        # With surrogatepass, half a surrogate pair is refused below, like invalid bytes.
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        if not isinstance(raw, bytes):
            return value  # pydantic refuses it, since it is not a string
        name = info.field_name
        if len(raw) > max_bytes:
            raise RequestError(f"{name} has a text of {len(raw)} bytes, at most {max_bytes} allowed (input {name})")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"{name} must be UTF-8, byte {error.start} is not (input {name})") from None

    return BeforeValidator(read)


def neutral(*values: Any) -> AfterValidator:
    """Declare an option that is not supported: only the values that leave it off are allowed."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value not in values:
            allowed = ", ".join(map(repr, values))
            name = info.field_name
            raise RequestError(f"{name} is not supported, got {abbreviated(value)}; allowed: {allowed} (input {name})")
        return value

    return AfterValidator(check)


def _refuse(value: Any, info: ValidationInfo) -> Any:
    """Refuse a tensor that is not supported, unless it is empty."""
    if not np.size(value):
        return value
    got = "a value" if isinstance(value, np.ndarray) else abbreviated(value)
    raise RequestError(f"{info.field_name} is not supported, got {got} (input {info.field_name})")


def _check_words(words: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """Return the words that are not empty; refuse more of them than can be searched for at every step."""
    words = tuple(filter(None, words))
    check_count(info.field_name, len(words), MAX_WORDS)
    return words


def at_most(count: int) -> BeforeValidator:
    """Declare a list of at most `count` values; a longer one is refused before its values are checked."""

    def check(values: Any, info: ValidationInfo) -> Any:
        if isinstance(values, list | tuple):
            check_count(info.field_name, len(values), count)
        return values

    return BeforeValidator(check)


# Every number is rounded to float32, so that a parameter gives the same p as an FP32 tensor.
_ROUNDED = AfterValidator(as_float32)
_LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | tuple) else (value,))
Text = Annotated[str, text()]
Name = Annotated[str, text(MAX_NAME_BYTES)]
# The length of a list is checked first: its words or weights are then checked one by one in Python.
Words = Annotated[
    tuple[Annotated[str, text(MAX_WORD_BYTES)], ...],
    FailFast(),
    _LISTED,
    at_most(MAX_WORD_ENTRIES),
    AfterValidator(_check_words),
]
Ids = Annotated[tuple[int, ...], FailFast(), _LISTED, at_most(MAX_IDS)]
Weights = Annotated[
    tuple[Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT), _ROUNDED], ...],
    FailFast(),
    _LISTED,
    at_most(MAX_BIASED),
]
Share = Annotated[float, Field(ge=0, le=1), _ROUNDED]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY), _ROUNDED]
Unsupported = Annotated[Any, PlainValidator(_refuse)]


class RequestInputs(Declaration):
    """The inputs of one request; for None, the value depends on the deployment or on other inputs."""

    # `read` refuses unknown names. If an input is given under both of its names, the first one counts.
    model_config = ConfigDict(extra="ignore")

    # what is generated from
    text_input: Text = ""
    input_ids: Ids = ()
    generated_ids: Ids = ()
    cache_salt: Annotated[str, text(MAX_SALT_BYTES)] = ""
    # when it ends
    max_tokens: int | None = None
    end_id: int | None = None
    stop_ids: Annotated[Ids, at_most(MAX_STOP_IDS)] = ()
    stop_words: Words = ()
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    timeout_ms: int = Field(0, ge=0, le=MAX_TIMEOUT_MS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, validation_alias=AliasChoices("min_tokens", "min_length"))
    # which token comes next
    temperature: Annotated[float | None, Field(ge=0, le=100), _ROUNDED] = None
    top_k: int = 0
    top_p: Share = 1.0
    min_p: Share = 0.0
    typical_p: Share = 1.0
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY), _ROUNDED] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias_ids: Annotated[Ids, at_most(MAX_BIASED)] = ()
    logit_bias_weights: Weights = ()
    embedding_bias_words: Words = ()
    embedding_bias_weights: Weights = ()
    bad_words: Words = ()
    allowed_token_ids: Ids = ()
    guided_decoding_guide_type: Name = ""
    guided_decoding_guide: Annotated[str, text(MAX_GUIDE_BYTES)] = ""
    seed: int | None = Field(None, ge=0, le=(1 << 64) - 1, validation_alias=AliasChoices("seed", "random_seed"))
    # how it is drafted
    speculation: Name = ""
    speculation_config: Annotated[str, text(MAX_CONFIG_BYTES)] = ""
    num_draft_tokens: int = 0
    rule: Name = ""
    typical_epsilon: Annotated[float | None, Field(ge=0, le=1), _ROUNDED] = None
    typical_delta: Share = DELTA
    use_draft_logits: bool = False
    draft_text: Text = ""
    draft_input_ids: Ids = ()
    # what comes back
    stream: bool = False
    exclude_input_in_output: bool = True
    num_return_sequences: int = 1
    sequence_index: int = Field(0, ge=0, le=MAX_SEQUENCE_INDEX)
    return_log_probs: bool = False
    num_top_log_probs: int = Field(0, ge=0, le=MAX_TOP)
    return_stats: bool = False
    return_steps: bool = False
    stream_steps: bool = False
    # accepted, and without effect
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    pad_id: Any = None
    # not supported
    length_penalty: Annotated[float, neutral(0.0, 1.0)] = 1.0
    beam_width: Annotated[int, neutral(0, 1)] = 1
    return_context_logits: Annotated[bool, neutral(False)] = False
    return_generation_logits: Annotated[bool, neutral(False)] = False
    return_perf_metrics: Annotated[bool, neutral(False)] = False
    decoder_text_input: Annotated[Text, neutral("")] = ""
    image_input: Unsupported = None
    image_bytes_input: Unsupported = None
    image_url_input: Annotated[Text, neutral("")] = ""
    video_bytes_input: Unsupported = None
    prompt_embedding_table: Unsupported = None
    prompt_vocab_size: Annotated[int, neutral(0)] = 0
    prompt_table_extra_id: Unsupported = None
    lora_task_id: Annotated[int, neutral(0)] = 0
    lora_weights: Unsupported = None
    lora_config: Unsupported = None


#: Every name of an input, and its declaration.
INPUTS = fields_of(RequestInputs)


def read(tensors: Mapping[str, npt.NDArray[Any]], parameters: str) -> RequestInputs:
    """Read a request's tensors and its parameters, a JSON object.

    Over /generate, keys that are not tensors become parameters. A tensor overrides the parameter of the same name.
    Raises RequestError for an unknown name, a value that an input cannot have, or an unsupported option.
    """
    if (num_bytes := len(parameters.encode(errors="surrogatepass"))) > MAX_PARAMETERS_BYTES:
        raise RequestError(
            f"the request's parameters have {num_bytes} bytes of JSON, at most {MAX_PARAMETERS_BYTES} allowed "
            "(request parameters; a long text belongs in a tensor)"
        )
    values = json_object(parameters or "{}", "request parameters", RequestError)
    values = {key: value for key, value in values.items() if key not in RESERVED and not key.startswith("triton_")}
    values |= {name: _from_tensor(name, tensor) for name, tensor in tensors.items()}
    return validate(RequestInputs, values, _where, error=RequestError, what="parameter")


def _where(name: str) -> str:
    return f"input {name}" if name in INPUTS else "request parameters"


def _from_tensor(name: str, tensor: npt.NDArray[Any]) -> Any:
    """Return a tensor's value; the tensor itself for an input that is not supported."""
    kind = INPUTS[name].annotation
    if kind is Any:
        return tensor
    if tensor.size > MAX_IDS:  # before each value becomes a Python object
        raise RequestError(f"{name} has {tensor.size} values, at most {MAX_IDS} allowed (input {name})")
    if get_origin(kind) is tuple:
        return tensor.reshape(-1).tolist()
    if tensor.size != 1:
        raise RequestError(f"{name} must have one value, got {tensor.size} (input {name})")
    return tensor.item()


def check_count(name: str | None, count: int, most: int) -> None:
    """Raise RequestError for a list with too many entries."""
    if count > most:
        raise RequestError(f"{name} has {count} entries, at most {most} allowed (input {name})")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise RequestError for a number outside low..high; for bounds that depend on more than the input itself."""
    if not low <= value <= high:
        raise RequestError(f"{name} must be in {low}..{high}, got {abbreviated(value)} (input {name})")


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError for an id outside the vocabulary."""
    if (outside := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
        raise RequestError(f"{name} must have ids in 0..{vocab_size - 1}, got {outside} (input {name})")
