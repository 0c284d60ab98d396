"""Triton model `draft`, which answers what a test has written: a request's cache_salt names a file in SCRIPT_FOLDER.

`<salt>.npz` is the answer, by the tree's fields; the salts "raises", "slow" and "hangs" do what they say. `<salt>.calls`
grows by a byte per call.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator.core.deployment.config import ENGINE_KEY
from orchestrator.core.messages.codec import decode_call, packed
from orchestrator.core.messages.context import Release

FOLDER = Path(os.environ["SCRIPT_FOLDER"])


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [pb_utils.InferenceResponse(self._answer(request)) for request in requests]

    def _answer(self, request: Any) -> list[Any]:
        message = pb_utils.get_input_tensor_by_name(request, "message").as_numpy()
        call = decode_call(message, os.environ[ENGINE_KEY])
        if isinstance(call, Release):
            return [_message(None)]
        script = call.delta.cache_salt
        with (FOLDER / f"{script}.calls").open("a") as calls:
            calls.write("x")
        if script == "raises":
            raise ValueError("a drafter's own trouble")
        time.sleep({"slow": 0.5, "hangs": 60}.get(script, 0))
        arrays = np.load(FOLDER / f"{script}.npz")
        return [_message([{name: _sendable(arrays[name]) for name in arrays.files}])]


def _sendable(array: np.ndarray) -> Any:
    """Return what another program might send instead of an array that cannot cross."""
    return array if array.dtype in (np.int32, np.float32, np.bool_) else array.tolist()


def _message(answer: Any) -> Any:
    return pb_utils.Tensor("message", packed(answer))
