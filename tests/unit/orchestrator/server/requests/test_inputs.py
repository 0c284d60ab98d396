"""A request's inputs: what is read, what is refused in which words, and that Triton's configuration declares the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.core.errors import RequestError
from orchestrator.server.inputs import (
    INPUTS,
    MAX_IDS,
    MAX_STOP_IDS,
    MAX_WORD_BYTES,
    MAX_WORDS,
    RESERVED,
    RequestInputs,
    read,
)
from tests.support.input_kinds import UNSUPPORTED, kind_of

REPOSITORY = Path(__file__).resolve().parents[5] / "model_repository"

#: One valid value per kind, as tensor and as JSON; both must read the same.
VALUES: dict[str, tuple[np.ndarray, Any, Any]] = {
    "text": (np.array(["né".encode()], np.object_), "né", "né"),
    "texts": (np.array([b"a", b"", b"b"], np.object_), ["a", "", "b"], ("a", "b")),
    "int": (np.array([7], np.int32), 7, 7),
    "ints": (np.array([7, 8], np.int32), [7, 8], (7, 8)),
    "float": (np.array([0.5], np.float32), 0.5, 0.5),
    "floats": (np.array([0.5, 2], np.float32), [0.5, 2], (0.5, 2.0)),
    "bool": (np.array([True]), True, True),
    "seed": (np.array([2**64 - 1], np.uint64), 2**64 - 1, 2**64 - 1),
}
SUPPORTED = [name for name in INPUTS if name not in UNSUPPORTED]


def one(name: str, tensor: Any, parameters: str = "") -> Any:
    """Read a single input."""
    return value_of(read({name: np.asarray(tensor)}, parameters), name)


def value_of(inputs: RequestInputs, name: str) -> Any:
    """Return an input's value by any of its names."""
    return getattr(inputs, {"min_length": "min_tokens", "random_seed": "seed"}.get(name, name))


def refusal(tensors: dict[str, np.ndarray], parameters: Any = None) -> str:
    """Return the words of the refusal; one line and short, whatever the client sent."""
    with pytest.raises(RequestError) as caught:
        read(tensors, "" if parameters is None else json.dumps(parameters))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Reading


@pytest.mark.parametrize("name", [name for name in SUPPORTED if kind_of(name) != "any"])
def test_read_supported_input_tensor_and_parameter_give_the_same_value(name: str) -> None:
    tensor, value, expected = VALUES[kind_of(name)]
    for shaped in (tensor, tensor[None], tensor.reshape(1, 1, -1)):
        got = one(name, shaped)
        assert got == expected and type(got) is type(expected)
    parameter = value_of(read({}, json.dumps({name: value})), name)
    assert parameter == expected and type(parameter) is type(expected)


def test_read_tensor_wins_over_the_parameter_of_the_same_name() -> None:
    assert one("max_tokens", [3], '{"max_tokens": 9}') == 3


def test_read_reserved_parameters_are_none_of_ours() -> None:
    reserved = dict.fromkeys(RESERVED, 1) | {"triton_enable_empty_final_response": True, "triton_x": "y"}
    assert read({}, json.dumps(reserved)) == RequestInputs()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("tempature", "temperature"), ("max_token", "max_tokens"), ("top-p", "top_p"), ("stopwords", "stop_words")],
)
def test_read_misspelt_parameter_names_the_nearest(wrong: str, right: str) -> None:
    said = refusal({}, {wrong: 1})
    assert f"unknown parameter {wrong!r}; did you mean {right!r}?" in said
    assert all(name in said for name in INPUTS)


# Values


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 1.5, "an integer, got 1.5"),
        ("max_tokens", True, "an integer, got True"),
        ("max_tokens", "8", "an integer, got '8'"),
        ("max_tokens", None, "an integer, got None"),
        ("max_tokens", [8], r"an integer, got [8]"),
        ("seed", 1.0, "an integer in 0..18446744073709551615, got 1.0"),
        ("seed", False, "an integer in 0..18446744073709551615, got False"),
        ("temperature", "hot", "a number in 0..100, got 'hot'"),
        ("temperature", True, "a number in 0..100, got True"),
        ("stream", 1, "true or false, got 1"),
        ("stream", "true", "true or false, got 'true'"),
        ("speculation", 3, "a string, got 3"),
        ("stop_words", ["a", 3], "a list in which each value is a string, got 3"),
        ("input_ids", [1, 2.5], "a list in which each value is an integer, got 2.5"),
        ("input_ids", [1, True], "a list in which each value is an integer, got True"),
        ("input_ids", "abc", "a list in which each value is an integer, got 'abc'"),
    ],
)
def test_read_parameter_of_the_wrong_type_says_what_value_allowed_and_where(name: str, value: Any, words: str) -> None:
    assert refusal({}, {name: value}) == f"{name} must be {words} (input {name})"


def test_read_long_value_is_not_echoed_whole() -> None:
    assert len(refusal({}, {"max_tokens": "9" * 100_000})) < 300


@pytest.mark.parametrize("size", [0, 2])
def test_read_scalar_with_another_number_of_values_is_refused(size: int) -> None:
    said = refusal({"max_tokens": np.zeros(size, np.int32)})
    assert said == f"max_tokens must have one value, got {size} (input max_tokens)"


@pytest.mark.parametrize("raw", [b"\xff", b"ab\xc3", b"\xed\xa0\x80", b"\xc0\x80"])
def test_read_invalid_utf8_names_the_byte(raw: bytes) -> None:
    at = 2 if raw[:1] == b"a" else 0
    for name in ("text_input", "speculation_config", "stop_words"):
        said = refusal({name: np.array([raw], np.object_)})
        assert said == f"{name} must be UTF-8, byte {at} is not (input {name})"


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1.0, 101.0, np.nextafter(0, -1)])
def test_read_number_out_of_range_is_refused(name: str, value: float) -> None:
    assert re.match(rf"{name} must be a number in 0\.\.1(00)?, got ", refusal({}, {name: value}))


def test_read_empty_words_are_ignored() -> None:
    assert one("stop_words", np.array([[b""]], np.object_)) == ()
    assert one("bad_words", np.array([[b"", b""]], np.object_)) == ()
    assert read({}, '{"stop_words": "", "bad_words": [""]}').stop_words == ()


# Options that are not supported


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_read_unsupported_option_other_value_is_refused_by_name(name: str) -> None:
    tensor, value, _ = VALUES.get(kind_of(name), (np.ones((1, 2), np.float16), 3, None))
    said = refusal({name: tensor})
    assert said.startswith(f"{name} is not supported, got ") and said.endswith(f"(input {name})")
    assert all(repr(v) in said for v in UNSUPPORTED[name])
    assert refusal({}, {name: value}).startswith(f"{name} is not supported, got ")


# Word lists


def test_read_words_have_limits() -> None:
    assert read({}, json.dumps({"stop_words": ["a"] * MAX_WORDS})).stop_words == ("a",) * MAX_WORDS
    assert read({}, json.dumps({"stop_words": ["é" * (MAX_WORD_BYTES // 2)]})).stop_words
    said = refusal({}, {"stop_words": ["a"] * (MAX_WORDS + 1)})
    assert said == f"stop_words has {MAX_WORDS + 1} entries, at most {MAX_WORDS} allowed (input stop_words)"
    said = refusal({}, {"stop_words": ["a", "a" * (MAX_WORD_BYTES + 1)]})
    assert f"text of {MAX_WORD_BYTES + 1} bytes, at most {MAX_WORD_BYTES} allowed (input stop_words)" in said


# What Triton declares

#: The inputs of TensorRT-LLM 0.19 and 1.x's tensorrt_llm_bls/config.pbtxt, old and new names.
TENSORRT_LLM_INPUTS = {
    "text_input": ("STRING", "1"),
    "decoder_text_input": ("STRING", "1"),
    "image_input": ("FP16", "-1,3,-1,-1"),
    "image_bytes_input": ("UINT8", "-1,-1,-1,-1"),
    "image_url_input": ("STRING", "1"),
    "video_bytes_input": ("UINT8", "-1,-1,-1,-1"),
    "max_tokens": ("INT32", "1"),
    "bad_words": ("STRING", "-1"),
    "stop_words": ("STRING", "-1"),
    "exclude_input_in_output": ("BOOL", "1"),
    "end_id": ("INT32", "1"),
    "pad_id": ("INT32", "1"),
    "top_k": ("INT32", "1"),
    "top_p": ("FP32", "1"),
    "temperature": ("FP32", "1"),
    "length_penalty": ("FP32", "1"),
    "repetition_penalty": ("FP32", "1"),
    "min_tokens": ("INT32", "1"),
    "min_length": ("INT32", "1"),
    "presence_penalty": ("FP32", "1"),
    "frequency_penalty": ("FP32", "1"),
    "seed": ("UINT64", "1"),
    "random_seed": ("UINT64", "1"),
    "return_log_probs": ("BOOL", "1"),
    "return_context_logits": ("BOOL", "1"),
    "return_generation_logits": ("BOOL", "1"),
    "num_return_sequences": ("INT32", "1"),
    "beam_width": ("INT32", "1"),
    "stream": ("BOOL", "1"),
    "prompt_embedding_table": ("FP16", "-1,-1"),
    "prompt_vocab_size": ("INT32", "1"),
    "prompt_table_extra_id": ("UINT64", "1"),
    "embedding_bias_words": ("STRING", "-1"),
    "embedding_bias_weights": ("FP32", "-1"),
    "num_draft_tokens": ("INT32", "1"),
    "use_draft_logits": ("BOOL", "1"),
    "lora_task_id": ("UINT64", "1"),
    "lora_weights": ("FP16", "-1,-1"),
    "lora_config": ("INT32", "-1,3"),
    "return_perf_metrics": ("BOOL", "1"),
    "guided_decoding_guide_type": ("STRING", "1"),
    "guided_decoding_guide": ("STRING", "1"),
    "return_num_input_tokens": ("BOOL", "1"),
    "return_num_output_tokens": ("BOOL", "1"),
}
#: Data type and dims of an input of each kind; "any" is not read, so it may have any.
DECLARED_AS = {
    "text": ("STRING", "1"),
    "texts": ("STRING", "-1"),
    "int": ("INT32", "1"),
    "ints": ("INT32", "-1"),
    "float": ("FP32", "1"),
    "floats": ("FP32", "-1"),
    "bool": ("BOOL", "1"),
    "seed": ("UINT64", "1"),
}
TENSOR = re.compile(r'\{ name: "(\w+)", data_type: TYPE_(\w+), dims: \[([-\d, ]+)\](, optional: true)? \}')


def config_text(model: str) -> str:
    """The configuration without its comments."""
    return re.sub(r"#.*", "", (REPOSITORY / model / "config.pbtxt").read_text())


def declared(model: str, block: str) -> dict[str, tuple[str, str]]:
    """Return {name: (data type, dims)} of the block `input` or `output`."""
    body = re.search(rf"^{block} \[\n(.*?)^\]", config_text(model), re.MULTILINE | re.DOTALL)
    assert body
    lines = [line.strip().rstrip(",") for line in body[1].splitlines() if line.strip()]
    found = [match for line in lines if (match := TENSOR.fullmatch(line))]
    assert len(found) == len(lines) and len({match[1] for match in found}) == len(found)
    assert block == "output" or all(match[4] for match in found), "every input is optional"
    return {match[1]: (match[2], match[3].replace(" ", "")) for match in found}


def test_config_of_speculative_declares_exactly_the_inputs_that_are_read() -> None:
    inputs = declared("speculative", "input")
    assert set(inputs) == set(INPUTS)
    wrong = {n: d for n, d in inputs.items() if kind_of(n) != "any" and d != DECLARED_AS[kind_of(n)]}
    assert not wrong


def test_config_of_speculative_holds_every_input_of_tensorrt_llm_s_bls_model() -> None:
    text = (REPOSITORY / "speculative/config.pbtxt").read_text()
    block = text.split("as in TensorRT-LLM's BLS model", 1)[1].split("# ours", 1)[0]
    listed = {match[1]: (match[2], match[3].replace(" ", "")) for match in TENSOR.finditer(block)}
    assert listed == TENSORRT_LLM_INPUTS


def test_config_of_speculative_unary_differs_in_name_and_policy_only() -> None:
    streamed, unary = config_text("speculative"), config_text("speculative_unary")
    assert streamed != unary
    assert streamed == unary.replace('"speculative_unary"', '"speculative"').replace(
        "decoupled: false", "decoupled: true"
    )


@pytest.mark.parametrize(("name", "most"), [("stop_ids", MAX_STOP_IDS), ("input_ids", MAX_IDS)])
def test_read_lists_of_ids_have_limits(name: str, most: int) -> None:
    assert one(name, np.zeros(most, np.int32)) == (0,) * most
    said = refusal({name: np.zeros(most + 1, np.int32)})
    assert f"{name} has {most + 1} " in said and f"at most {most} allowed (input {name})" in said


def test_read_a_long_tensor_is_refused_before_its_values_become_objects() -> None:
    """4 GB that are never touched: a list of them would not fit."""
    values = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (1 << 30,), (0,))
    assert f"at most {MAX_IDS} allowed (input generated_ids)" in refusal({"generated_ids": values})
    assert f"at most {MAX_IDS} allowed (input max_tokens)" in refusal({"max_tokens": values})
