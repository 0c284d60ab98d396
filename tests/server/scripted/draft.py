"""Triton model `draft` that misbehaves: a request's cache_salt says how; SCRIPT_FOLDER/<salt>.calls grows by one per call."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = Path(os.environ["SCRIPT_FOLDER"])

#: Sound trees, true or not: (ids, parents).
SOUND = {
    "star": (range(60), [0] * 60),
    "wrong chain": ([7] * 4, range(4)),
    "deep chain": (range(60), range(60)),
}
#: What is no tree.
BROKEN = {
    "cycle": ([1, 2], [2, 1]),
    "own parent": ([1], [1]),
    "negative parent": ([1, 2], [0, -1]),
    "parent behind its child": ([1, 2, 3], [0, 3, 1]),
    "a million nodes": (range(10**6), range(10**6)),
    "a million children": ([1] * 10**6, [0] * 10**6),
    "more nodes than asked for": ([1] * 200, range(200)),
    "id above the vocabulary": ([1, 64], [0, 1]),
    "negative id": ([-1], [0]),
    "huge ids": ([2**31 - 1] * 3, range(3)),
    "twin children": ([5, 5], [0, 0]),
    "fewer parents than ids": ([1, 2, 3], [0]),
}
#: What is no tensor of a tree.
FOREIGN = {
    "floats": [np.array([np.nan, 1e30], np.float32), np.array([0.0, np.inf], np.float32)],
    "int64": [np.array([2**40, -(2**40)], np.int64), np.array([2**40, 7], np.int64)],
    "text": [np.array([b"one", b"two"], np.object_), np.array([b"0", b"1"], np.object_)],
    "booleans": [np.array([True, True]), np.array([False, True])],
    "two dimensions": [np.ones((2, 2), np.int32), np.ones((2, 2), np.int32)],
    "nothing but ids": [np.array([1], np.int32)],
    "empty": [np.empty(0, np.int32), np.empty(0, np.int32)],
    "no outputs": [],
}


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        salt = pb_utils.get_input_tensor_by_name(request, "cache_salt")
        if pb_utils.get_input_tensor_by_name(request, "release") or salt is None:
            return pb_utils.InferenceResponse([])
        script = salt.as_numpy()[0].decode()
        with (FOLDER / f"{script}.calls").open("a") as calls:
            calls.write("x")
        if script in FOREIGN:
            return _response(FOREIGN[script])
        return _response([np.array(list(values), np.int32) for values in self._tree(script)])

    def _tree(self, script: str) -> Any:
        if script == "raises":
            raise ValueError("a drafter's own trouble")
        if script == "slow":
            time.sleep(0.5)
        if script == "hangs":
            time.sleep(60)
        if script == "random":
            num = random.randint(1, 40)
            edges = {(random.randint(0, i), random.randint(0, 63)): i for i in range(num)}
            return [token for _, token in edges], [min(parent, i) for i, (parent, _) in enumerate(edges)]
        return BROKEN.get(script) or SOUND.get(script) or SOUND["star"]


def _response(tensors: list[np.ndarray]) -> Any:
    names = ("node_ids", "node_parents")[: len(tensors)]
    return pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in zip(names, tensors, strict=True)])
