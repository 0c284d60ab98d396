"""Triton model `draft`, which answers what a test has written: a request's cache_salt names a file in SCRIPT_FOLDER.

`<salt>.npz` is the answer, by tensor name; the salts "raises", "slow" and "hangs" do what they say. `<salt>.calls`
grows by a byte per call.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator.core.messages.message import decode, encode

FOLDER = Path(os.environ["SCRIPT_FOLDER"])


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [pb_utils.InferenceResponse(self._answer(request)) for request in requests]

    def _answer(self, request: Any) -> list[Any]:
        tensors = decode(pb_utils.get_input_tensor_by_name(request, "message").as_numpy())
        if "release" in tensors:
            return [_message({})]
        script = tensors["cache_salt"][0].decode()
        with (FOLDER / f"{script}.calls").open("a") as calls:
            calls.write("x")
        if script == "raises":
            raise ValueError("a drafter's own trouble")
        time.sleep({"slow": 0.5, "hangs": 60}.get(script, 0))
        arrays = np.load(FOLDER / f"{script}.npz")
        return [_message({name: _as_we_send_it(arrays[name]) for name in arrays.files})]


def _message(tensors: dict[str, np.ndarray]) -> Any:
    return pb_utils.Tensor("message", encode(tensors))


def _as_we_send_it(array: np.ndarray) -> np.ndarray:
    return array.astype(np.object_) if array.dtype.kind == "S" else array
