"""Triton model `draft` that answers what a test has written: a request's cache_salt names a file in SCRIPT_FOLDER.

`<salt>.npz` holds the answer, by output name; the salts "raises", "slow" and "hangs" do that instead. `<salt>.calls` grows
by a byte per call.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = Path(os.environ["SCRIPT_FOLDER"])


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [pb_utils.InferenceResponse(self._answer(request)) for request in requests]

    def _answer(self, request: Any) -> list[Any]:
        salt = pb_utils.get_input_tensor_by_name(request, "cache_salt")
        if salt is None:  # the end of a sequence
            return []
        script = salt.as_numpy()[0].decode()
        with (FOLDER / f"{script}.calls").open("a") as calls:
            calls.write("x")
        if script == "raises":
            raise ValueError("a drafter's own trouble")
        time.sleep({"slow": 0.5, "hangs": 60}.get(script, 0))
        arrays = np.load(FOLDER / f"{script}.npz")
        return [pb_utils.Tensor(name, _as_triton_has_it(arrays[name])) for name in arrays.files]


def _as_triton_has_it(array: np.ndarray) -> np.ndarray:
    return array.astype(np.object_) if array.dtype.kind == "S" else array
