"""NOT NVIDIA's backend: a Python model in the place of the C++ backend `tensorrtllm`, over the stand-in of its executor.

It takes the real backend's config.pbtxt, of which only the backend's name is changed, and is strict about every tensor
by the project's table of them. In the folder SCRIPT_FOLDER it appends a line to `calls` for each request, and reads
`lie` (how to answer falsely) and `hold` (how many requests must be under way before the first is answered).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "standin"), str(TESTS.parent)]

from tensorrt_llm.bindings import executor as trtllm  # noqa: E402

TABLE = json.loads((TESTS / "data/trtllm/tensorrt_llm.json").read_text())
INPUTS = {tensor["name"]: tensor for tensor in TABLE["inputs"]}
PARAMETERS = {parameter["key"] for parameter in TABLE["parameters"]}
DTYPES = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}
TAKEN = {
    "input_ids", "input_lengths", "request_output_len", "draft_input_ids", "end_id", "pad_id", "runtime_top_k",
    "runtime_top_p", "temperature", "seed", "stop", "return_perf_metrics", "lookahead_window_size",
    "lookahead_ngram_size", "lookahead_verification_set_size",
}  # fmt: skip
# Read outside of any try: inflight_batcher_llm/src/model_instance_state.cc, getGuidedDecodingConfigFromParams.
REQUIRED_PARAMETERS = ("tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")
COUNTED = {"total_accepted_draft_tokens", "total_draft_tokens"}
FOLDER = Path(os.environ["SCRIPT_FOLDER"])
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        assert set(parameters) <= PARAMETERS, set(parameters) - PARAMETERS
        assert parameters["gpt_model_type"] == "inflight_fused_batching"
        self._name = config["name"]
        assert not config["model_transaction_policy"]["decoupled"], "our target refuses to call a decoupled model"
        self._excludes_input = parameters.get("exclude_input_in_output") == "true"
        for name in REQUIRED_PARAMETERS:
            assert name in parameters, f"the parameter {name} is missing"
        reuse = trtllm.KvCacheConfig(enable_block_reuse=parameters.get("enable_kv_cache_reuse", "true") == "true")
        executor_config = trtllm.ExecutorConfig(
            1,
            kv_cache_config=reuse,
            enable_chunked_context=parameters.get("enable_chunked_context") == "true",
            decoding_config=decoding(parameters),
        )
        self._executor = trtllm.Executor(parameters["gpt_model_path"], trtllm.ModelType.DECODER_ONLY, executor_config)
        self._lock = threading.Lock()
        self._running: dict[int, tuple[str, Any, list[int]]] = {}
        self._hanging: dict[str, Any] = {}
        threading.Thread(target=self._await, daemon=True).start()

    def execute(self, requests: list[Any]) -> Any:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._begin(request, sender)
            except Exception as error:
                words = pb_utils.TritonError(f"{type(error).__name__}: {error}\n  at somewhere in C++")
                sender.send(pb_utils.InferenceResponse([], error=words), flags=FINAL)
        return [None] * len(requests)

    def finalize(self) -> None:
        self._executor.shutdown()

    def _begin(self, request: Any, sender: Any) -> None:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        self._note(request.request_id(), tensors)
        check(tensors, sorted(request.requested_output_names()))
        if "stop" in tensors and tensors["stop"].item():
            self._stop(request.request_id(), sender)
            return
        ids = tensors["input_ids"][0].tolist()
        with self._lock:
            self._hold(len(self._running) + 1)
            number = self._executor.enqueue_request(asked(tensors, ids))
            self._running[number] = (request.request_id(), sender, ids)

    def _note(self, request_id: str, tensors: dict[str, Any]) -> None:
        shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
        with (FOLDER / "calls").open("a") as file:
            file.write(json.dumps({"model": self._name, "id": request_id, "tensors": shapes}) + "\n")

    def _hold(self, num_running: int) -> None:
        """Hold the engine until as many requests run as `hold` says; without the file, let it go on."""
        file = FOLDER / "hold"
        if self._name != "tensorrt_llm":
            return
        if file.exists() and num_running < int(file.read_text()):
            self._executor.gate.clear()
        else:
            file.unlink(missing_ok=True)
            self._executor.gate.set()

    def _stop(self, request_id: str, sender: Any) -> None:
        assert request_id, "a stop has the id of the request that it ends"
        with self._lock:
            for number, (running_id, _, _) in self._running.items():
                if running_id == request_id:
                    self._executor.cancel_request(number)
            hanging = self._hanging.pop(request_id, None)
        if hanging:
            hanging.send(pb_utils.InferenceResponse([]), flags=FINAL)
        sender.send(pb_utils.InferenceResponse([]), flags=FINAL)

    def _await(self) -> None:
        while True:
            for response in self._executor.await_responses(timeout=timedelta(seconds=0.1)):
                with self._lock:
                    request_id, sender, ids = self._running.pop(response.request_id)
                    lie = (FOLDER / "lie").read_text() if (FOLDER / "lie").exists() else ""
                    if lie == "hangs":
                        self._hanging[request_id] = sender
                        continue
                self._answer(sender, ids, response, lie)

    def _answer(self, sender: Any, ids: list[int], response: Any, lie: str) -> None:
        """Answer as the backend does, or as a test wants it."""
        if response.has_error():
            words = pb_utils.TritonError(f"{response.error_msg}\n  at somewhere in C++")
            sender.send(pb_utils.InferenceResponse([], error=words), flags=FINAL)
            return
        output = response.result.output_token_ids[0]
        output = output[len(ids) :] if self._excludes_input and output else output
        if lie == "fails":
            words = pb_utils.TritonError("scripted failure\n  at somewhere in C++")
            sender.send(pb_utils.InferenceResponse([], error=words), flags=FINAL)
            return
        tensors = told(output, len(ids), lie) + counted(response.result.request_perf_metrics)
        sender.send(pb_utils.InferenceResponse(tensors), flags=FINAL)


def decoding(parameters: dict[str, str]) -> Any:
    """Return how the engine decodes, which for Lookahead needs all three sizes."""
    if parameters.get("decoding_mode") != "lookahead":
        return None
    sizes = [int(parameters[f"lookahead_{name}"]) for name in ("window_size", "ngram_size", "verification_set_size")]
    return trtllm.DecodingConfig(
        trtllm.DecodingMode.Lookahead(), lookahead_decoding_config=trtllm.LookaheadDecodingConfig(*sizes)
    )


def counted(metrics: Any) -> list[Any]:
    """Return what the executor has counted, where it was asked to."""
    if metrics is None:
        return []
    found = metrics.speculative_decoding
    values = {
        "total_accepted_draft_tokens": found.total_accepted_draft_tokens,
        "total_draft_tokens": found.total_draft_tokens,
    }
    return [pb_utils.Tensor(name, np.array([[value]], np.int32)) for name, value in values.items()]


def check(tensors: dict[str, Any], outputs: list[str]) -> None:
    """Raise where the table says otherwise."""
    assert set(outputs) - COUNTED == {"output_ids", "sequence_length"}, outputs
    lookahead = [name for name in tensors if name.startswith("lookahead_")]
    assert len(lookahead) in (0, 3), f"all three together: {lookahead}"
    required = {name for name, declared in INPUTS.items() if not declared["optional"]}
    assert required | {"input_ids"} <= set(tensors) <= TAKEN, sorted(tensors)
    for name, tensor in tensors.items():
        declared = INPUTS[name]
        assert tensor.dtype == DTYPES[declared["dtype"]], f"{name}: {tensor.dtype}"
        inner = () if "reshape" in declared else tuple(declared["dims"])
        assert tensor.ndim == 1 + len(inner) and tensor.shape[0] == 1, f"{name}: {tensor.shape}"
        assert all(dim in (-1, size) for dim, size in zip(inner, tensor.shape[1:], strict=True)), (
            f"{name}: {tensor.shape}"
        )
        assert tensor.size, f"{name} is empty"
    assert tensors["input_lengths"].item() == tensors["input_ids"].shape[1], "input_lengths"


def asked(tensors: dict[str, Any], ids: list[int]) -> Any:
    """Return the executor's request."""
    scalars = {name: tensors[name].item() for name in tensors if tensors[name].size == 1}
    drafts = tensors["draft_input_ids"][0].tolist() if "draft_input_ids" in tensors else []
    more: dict[str, Any] = {}
    names = {"runtime_top_k": "top_k", "runtime_top_p": "top_p", "temperature": "temperature", "seed": "seed"}
    sampling = trtllm.SamplingConfig(**{ours: scalars[name] for name, ours in names.items() if name in scalars})
    if scalars.get("return_perf_metrics"):
        more["output_config"] = trtllm.OutputConfig(return_perf_metrics=True)
    sizes = [scalars[name] for name in sorted(scalars, key=list(INPUTS).index) if name.startswith("lookahead_")]
    if sizes:
        more["lookahead_config"] = trtllm.LookaheadDecodingConfig(*sizes)
    external = {"external_draft_tokens_config": trtllm.ExternalDraftTokensConfig(drafts)} if drafts else {}
    return trtllm.Request(
        ids, scalars["request_output_len"], sampling_config=sampling, end_id=scalars.get("end_id"), **external, **more
    )


def told(output: list[int], num_input: int, lie: str) -> list[Any]:
    """Return the two output tensors, or what a test wants in their place."""
    shown = output[num_input:] if lie == "excludes the input" else output
    ids, lengths = np.array([[shown]], np.int32), np.array([[len(shown)]], np.int32)
    if lie == "nothing" or not output:
        return []
    if lie == "two beams":
        ids, lengths = np.repeat(ids, 2, axis=1), np.repeat(lengths, 2, axis=1)
    if lie == "too long":
        lengths = lengths + 7
    if lie == "no new token":
        lengths = np.array([[num_input]], np.int32)
    if lie == "no such token":
        ids[0, 0, -1] = 10**6
    return [pb_utils.Tensor("output_ids", ids), pb_utils.Tensor("sequence_length", lengths)]
