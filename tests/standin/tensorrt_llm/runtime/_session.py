"""NOT TensorRT-LLM: a Session over an "engine" that is a JSON text naming a checkpoint and its sizes.

It computes with the stock model of transformers in float64. What a token sees is what the packed bits say, its position
what the offsets say, and its past what stands in the KV pool at the addresses given: a wrong bit, offset or block gives
wrong logits. Strict about names, types, shapes and about lengths that must agree.
"""

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensorrt_llm.runtime._forward import Run

TABLE = json.loads((Path(__file__).parents[3] / "data/trtllm/engine_inputs.json").read_text())
INPUTS = {entry["name"]: entry for entry in (*TABLE["inputs"], *TABLE["other_inputs"])}
TORCH = {"INT32": torch.int32, "INT64": torch.int64, "FLOAT": torch.float32}
PADDING = 8


class DataType(Enum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    INT64 = 8


class TensorIOMode(Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


@dataclass
class TensorInfo:
    name: str
    dtype: DataType
    shape: tuple


class Engine:
    """Also, for tests: inputs, {name: type}, of which one may be taken out or put in."""

    def __init__(self, text):
        values = json.loads(text)
        self.checkpoint, self.sizes = values["checkpoint"], SimpleNamespace(**values["sizes"])
        self.inputs = {name: DataType[entry["dtype"]] for name, entry in INPUTS.items()}
        self.inputs |= {name: DataType[kind] for name, kind in values.get("others", {}).items()}
        for name in values.get("without", []):
            del self.inputs[name]

    @property
    def num_io_tensors(self):
        return len(self.inputs) + 1

    def get_tensor_name(self, index):
        return [*self.inputs, "logits"][index]

    def get_tensor_mode(self, name):
        if name == "logits":
            return TensorIOMode.OUTPUT
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.NONE

    def get_tensor_dtype(self, name):
        return DataType.FLOAT if name == "logits" else self.inputs[name]


class Session:
    def __init__(self, **kwargs):
        pass

    @staticmethod
    def from_serialized_engine(engine):
        if not isinstance(engine, bytes):
            raise TypeError("an engine is bytes")
        session = Session()
        session._engine = Engine(engine.decode())
        session._shapes: dict[str, Any] = {}
        session.runs = []
        return session

    @property
    def engine(self):
        return self._engine

    def infer_shapes(self, inputs, context=None):
        for info in inputs:
            if self.engine.get_tensor_mode(info.name) is not TensorIOMode.INPUT:
                raise ValueError(f"Tensor:{info.name} is not an input tensor")
            if self.engine.get_tensor_dtype(info.name) != info.dtype:
                raise ValueError(f"Tensor:{info.name} has wrong dtype")
        self._shapes = {info.name: tuple(info.shape) for info in inputs}
        self._check_shapes()
        num_rows = self._shapes["last_token_ids"][0]
        return [TensorInfo("logits", DataType.FLOAT, (num_rows, self._padded))]

    @property
    def _padded(self):
        return -(-(self.engine.sizes.vocab_size + 1) // PADDING) * PADDING

    def _check_shapes(self):
        if missing := self.engine.inputs.keys() - self._shapes.keys():
            raise RuntimeError(f"input shapes are not specified: {sorted(missing)}")
        sizes = self.engine.sizes
        known = {
            "max_seq_len": sizes.max_seq_len,
            "max_blocks": -(-sizes.max_seq_len // sizes.tokens_per_block),
            "layers": sizes.num_layers,
            "ceil((max_draft_len+1)/32)": -(-(sizes.max_draft_len + 1) // 32),
        }
        for name, shape in self._shapes.items():
            wanted = INPUTS[name]["shape"]
            if len(wanted) != len(shape):
                raise RuntimeError(f"{name} has {len(shape)} dimensions, not {len(wanted)}")
            for size, found in zip(wanted, shape, strict=True):
                if known.setdefault(size, found) != found and isinstance(size, str):
                    raise RuntimeError(f"{name}: {size} is {known[size]}, got {found}")
                if isinstance(size, int) and size != found:
                    raise RuntimeError(f"{name}: {found} instead of {size}")
        limits = {"B": sizes.max_batch_size, "num_tokens": sizes.max_num_tokens, "max_gen_len": sizes.max_draft_len + 1}
        for size, most in limits.items():
            if known[size] > most:
                raise RuntimeError(f"{size} = {known[size]} is beyond the profile's {most}")

    def run(self, inputs, outputs, stream, context=None):
        if inputs.keys() != self.engine.inputs.keys() or list(outputs) != ["logits"]:
            raise RuntimeError(f"addresses for other tensors: {sorted(inputs.keys() ^ self.engine.inputs.keys())}")
        for name, tensor in (*inputs.items(), *outputs.items()):
            if not tensor.is_contiguous():
                raise RuntimeError(f"{name} is not contiguous")
            if name in inputs and tuple(tensor.shape) != self._shapes[name]:
                raise RuntimeError(f"{name} is {tuple(tensor.shape)}, said to be {self._shapes[name]}")
            if tensor.dtype != TORCH[self.engine.get_tensor_dtype(name).name]:
                raise RuntimeError(f"{name} is {tensor.dtype}")
        run = Run(self.engine, inputs)
        rows = run.logits()[inputs["last_token_ids"].long() - 1]
        outputs["logits"].fill_(1e4)  # the padding, which nobody may read
        outputs["logits"][:, : self.engine.sizes.vocab_size] = rows.float()
        self.runs.append("step" if run.is_step else "context")
        return True
