"""Clients of NVIDIA's servers, unchanged, and of projects that use them: what they send and what they read.

Each test sends the payload of one client, taken from the source that its docstring names.
"""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from launcher.server import Server
from tests.server.conftest import ALIASES
from tests.support.clients import ask, connect, generate, post

pytestmark = pytest.mark.server

MODELS = ("speculative", *ALIASES)
PROMPT = "the quick brown fox jumps over the lazy dog the quick"
LIMIT_S = 60


def stream(server: Server, model: str, inputs: dict[str, np.ndarray], *outputs: str) -> list[Any]:
    """Send a request as NVIDIA's example clients do; return all results, or raise the error."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tensors = []
    for name, value in inputs.items():
        tensor = grpcclient.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result), stream_timeout=LIMIT_S)
        client.async_stream_infer(model, tensors, outputs=wanted, request_id="1")
        client.stop_stream()
    found = []
    while not answers.empty():
        answer = answers.get()
        if isinstance(answer, InferenceServerException):
            raise answer
        found.append(answer)
    return found


def texts(results: list[Any]) -> list[str]:
    """Return the text of each result that has one, read as NVIDIA's clients read it."""
    outputs = [result.as_numpy("text_output") for result in results]
    return [output[0].decode("utf-8") for output in outputs if output is not None]


def example_inputs(streaming: bool, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Return the inputs that end_to_end_grpc_client.py always sends."""
    return {
        "text_input": np.array([[PROMPT]]).astype(object),
        "max_tokens": np.array([[16]], np.int32),
        "stream": np.array([[streaming]], bool),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[0.0]], np.float32),
        "exclude_input_in_output": np.array([[True]], bool),
        **more,
    }


def strings(*words: str) -> np.ndarray:
    return np.array([words], dtype=object)


def floats(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array([values], np.int32)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streaming", [True, False])
def test_inflight_batcher_example_client(server: Server, model: str, streaming: bool) -> None:
    """NVIDIA/TensorRT-LLM, triton_backend/inflight_batcher_llm/client/end_to_end_grpc_client.py."""
    truth = ask(server.grpc_url, text_input=PROMPT, max_tokens=16).text
    results = stream(server, model, example_inputs(streaming), "text_output")
    found = texts(results)
    assert "".join(found) == truth and (len(found) > 1) == streaming


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"stop_words": strings("qu", "zz"), "bad_words": strings("fox")}, {"stop_words": ["qu", "zz"], "bad_words": ["fox"]}),
        ({"repetition_penalty": floats(1.2), "presence_penalty": floats(0.1), "frequency_penalty": floats(0.2)},
         {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2}),
        ({"end_id": ints(3), "pad_id": ints(0)}, {"end_id": 3}),
        ({"embedding_bias_words": strings("dog"), "embedding_bias_weights": floats(5.0)},
         {"embedding_bias_words": ["dog"], "embedding_bias_weights": [5.0]}),
        ({"num_draft_tokens": ints(3), "use_draft_logits": np.array([[False]])}, {"num_draft_tokens": 3}),
        ({"guided_decoding_guide_type": strings("regex"), "guided_decoding_guide": strings("[a-f ]+")},
         {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-f ]+"}),
        ({"min_length": ints(5), "random_seed": np.array([[7]], np.uint64), "top_k": ints(5), "top_p": floats(0.9)},
         {"min_tokens": 5, "seed": 7, "top_k": 5, "top_p": 0.9}),
        ({"length_penalty": floats(1.0), "return_context_logits": np.array([[False]])}, {}),
    ],
    ids=["words", "penalties", "ids", "bias", "draft", "guide", "older-names", "neutral"],
)  # fmt: skip
def test_inflight_batcher_example_client_options(
    server: Server, given: dict[str, np.ndarray], asked: dict[str, Any]
) -> None:
    """The options of the same client and of inflight_batcher_llm_client.py, including old names."""
    options = {"text_input": PROMPT, "max_tokens": 16, "temperature": 0.0, **asked}
    assert texts(stream(server, "ensemble", example_inputs(False, **given))) == [ask(server.grpc_url, **options).text]


def test_inflight_batcher_example_client_reads_log_probabilities(server: Server) -> None:
    """The shapes that the same client prints with --return-log-probs."""
    inputs = example_inputs(False, return_log_probs=np.array([[True]]))
    (result, *_) = stream(server, "tensorrt_llm_bls", inputs, "text_output", "cum_log_probs", "output_log_probs")
    per_token = result.as_numpy("output_log_probs")
    assert per_token.ndim == 3 and per_token.shape[:2] == (1, 1)
    assert result.as_numpy("cum_log_probs").reshape(-1)[0] == pytest.approx(per_token.sum(), abs=1e-4)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"beam_width": ints(2)}, "beam_width"),
        ({"length_penalty": floats(2.0)}, "length_penalty"),
        ({"return_context_logits": np.array([[True]])}, "return_context_logits"),
        ({"return_generation_logits": np.array([[True]])}, "return_generation_logits"),
        ({"return_perf_metrics": np.array([[True]])}, "return_perf_metrics"),
        ({"lora_task_id": np.array([[1]], np.uint64)}, "lora_task_id"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server: Server, given: dict[str, np.ndarray], name: str) -> None:
    with pytest.raises(InferenceServerException, match=rf"{name} is not supported.*\(input {name}\)"):
        stream(server, "tensorrt_llm_bls", example_inputs(False, **given), "text_output")


@pytest.mark.parametrize("streaming", [True, False])
def test_triton_s_own_openai_front_end(server: Server, streaming: bool) -> None:
    """triton-inference-server/server, python/openai/openai_frontend/engine/utils/triton.py: it takes one string per response."""
    inputs = {
        "text_input": strings(PROMPT),
        "stream": np.array([[streaming]], bool),
        "max_tokens": ints(16),
        "stop_words": strings("zz", "yy"),
        "top_p": floats(0.9),
        "frequency_penalty": floats(0.0),
        "presence_penalty": floats(0.0),
        "seed": np.array([[3]], np.uint64),
        "temperature": floats(0.7),
    }
    results = stream(server, "ensemble", inputs)
    outputs = [result.as_numpy("text_output") for result in results if result.get_response().outputs]
    assert all(output.size == 1 for output in outputs) and (len(outputs) > 1) == streaming
    truth = ask(server.grpc_url, text_input=PROMPT, max_tokens=16, top_p=0.9, seed=3, temperature=0.7)
    assert "".join(texts(results)) == truth.text
    assert sum(int(r.as_numpy("num_output_tokens").item()) for r in results if r.get_response().outputs) == len(
        truth.ids
    )


def litellm_body(streaming: bool) -> dict[str, Any]:
    return {
        "text_input": PROMPT,
        "parameters": {"max_tokens": 16, "temperature": 0, "bad_words": [""], "stop_words": [""]},
        "stream": streaming,
    }


@pytest.mark.parametrize("model", MODELS)
def test_litellm_route(server: Server, model: str) -> None:
    """BerriAI/litellm, litellm/llms/triton/completion/transformation.py: /generate with "parameters" and empty words."""
    truth = ask(server.grpc_url, text_input=PROMPT, max_tokens=16).text
    answer = generate(server.http_url, litellm_body(False), model)
    assert answer.status == 200 and answer.body["text_output"] == truth
    connection = connect(server.http_url)
    try:
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(litellm_body(True)))
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    events = [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]
    assert len(events) > 1 and "".join(event["text_output"] for event in events) == truth


def test_genai_perf_tensorrtllm_service(server: Server) -> None:
    """triton-inference-server/perf_analyzer, genai_perf/inputs/converters/tensorrtllm_converter.py: a fixed length."""
    inputs = {
        "text_input": strings(PROMPT),
        "max_tokens": ints(24),
        "min_length": ints(24),
        "stream": np.array([[True]], bool),
        "exclude_input_in_output": np.array([[True]], bool),
    }
    results = [r for r in stream(server, "ensemble", inputs) if r.get_response().outputs]
    assert sum(int(result.as_numpy("num_output_tokens").item()) for result in results) == 24


def test_older_langchain_client_is_told_about_its_types(server: Server) -> None:
    """langchain-ai/langchain-nvidia, libs/trt: sends max_tokens as UINT32, which TensorRT-LLM's models refuse, too."""
    inputs = {"text_input": strings(PROMPT), "max_tokens": np.array([[16]], np.uint32)}
    with pytest.raises(InferenceServerException, match=r"max_tokens.*UINT32"):
        stream(server, "ensemble", inputs)


def test_unknown_parameter_is_refused_under_an_alias_too(server: Server) -> None:
    answer = post(server.http_url, "/v2/models/ensemble/generate", {"text_input": "abc", "max_token": 3})
    assert "did you mean 'max_tokens'" in answer.error
