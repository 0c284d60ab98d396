"""A compiled engine in the place of our own model: the library's Session runs the forward pass of a `Pass`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestrator.core.errors import ConfigError, EngineError
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import HiddenStates
from orchestrator.wire.tensors import Tensors
from runtime.kv.batch import Pass, Segment
from runtime.kv.cache import KVCache, num_blocks_in
from runtime.trtllm.trees.geometry import Geometry
from runtime.trtllm.trees.inputs import Row, context_inputs, context_row, groups, step_inputs, step_row
from runtime.trtllm.trees.packed_mask import USE


class PoolCache(KVCache):
    """Keys and values in `kv`, (blocks, layers, 2, kv_heads, block_tokens, head_dim); no hidden states.

    Invariant: the engine finds K of block b in layer 0 at offset 2 · layers · b, and V at the next one, counted in
    blocks of one layer's keys; it adds the layer by itself.
    Source: BlocksManager of tensorrt_llm/runtime/kv_cache_manager.py.
    """

    def __init__(self, geometry: Geometry, memory_mb: int, device: torch.device) -> None:
        shape, size = geometry.shape, geometry.tokens_per_block
        self.block_tokens = size
        self.num_blocks = num_blocks_in(memory_mb, shape, size, geometry.kv_dtype)
        self.kv = torch.zeros(
            (self.num_blocks, shape.num_layers, 2, shape.num_kv_heads, size, shape.head_dim),
            dtype=geometry.kv_dtype,
            device=device,
        )
        self.features = torch.empty((self.num_blocks * size, 0), device=device)

    @torch.inference_mode()
    def move(self, sources: list[int], destinations: list[int]) -> None:
        """Copy slots to other slots, all read before any is written."""
        source = torch.tensor(sources, device=self.kv.device)
        destination = torch.tensor(destinations, device=self.kv.device)
        size = self.block_tokens
        moved = self.kv[source // size, :, :, :, source % size]
        self.kv[destination // size, :, :, :, destination % size] = moved


LOGITS = "logits"
#: TensorRT's names for the types of inputs and logits.
_TYPES = {"INT32": torch.int32, "INT64": torch.int64, "FLOAT": torch.float32, "HALF": torch.float16}


class SessionModel:
    """Implements `runtime.engine.paged.Model`.

    Invariant: for each segment it computes the same logits as `runtime.model.causal_lm.CausalModel`.
    """

    def __init__(
        self, library: Any, session: Any, geometry: Geometry, max_positions: int, device: torch.device
    ) -> None:
        """library: the module tensorrt_llm.runtime. Raises ConfigError when the engine has other tensors than ours."""
        self.geometry = geometry
        self.device = device
        self.dtype = torch.float32  # of the logits
        self.vocab_size = geometry.vocab_size
        self.max_positions = max_positions
        self._library = library
        self._session = session
        self._check_tensors()

    def prepare(self) -> None:
        """Choose the GPU for the thread that will call `forward`."""
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    def new_cache(self, memory_mb: int, block_tokens: int) -> PoolCache:
        """Return the KV blocks; block_tokens is not used, since the engine was compiled for a block size."""
        return PoolCache(self.geometry, memory_mb, self.device)

    @torch.inference_mode()
    def forward(self, batch: Pass[Segment], cache: PoolCache) -> Tensor:
        """Run the engine over the segments; returns the logits of every root and node, (rows, V) float32."""
        pool = cache.kv.data_ptr()
        contexts = [row for segment in batch.segments if (row := context_row(segment)).ids]
        for group in groups(contexts, self.geometry):  # contexts run first, in runs of their own
            self._run(context_inputs(group, self.geometry, pool))
        steps = groups([step_row(segment) for segment in batch.segments], self.geometry)
        return torch.cat([self._step(group, pool) for group in steps])

    def feature_columns(self, wanted: HiddenStates) -> slice:
        """Return no column: a compiled engine has no output for its hidden states."""
        return slice(0, 0)

    def _step(self, group: list[Row], pool: int) -> Tensor:
        logits = self._run(step_inputs(group, self.geometry, pool))
        num_rows = sum(len(row.ids) for row in group)
        if logits.ndim != 2 or len(logits) != num_rows or logits.shape[1] < self.vocab_size:
            raise EngineError(f"the engine gave logits {tuple(logits.shape)} for {num_rows} tokens")
        return logits[:, : self.vocab_size].float()

    def _run(self, inputs: Tensors) -> Tensor:
        """Run the engine once and return its logits."""
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        held = {name: tensor if is_host(name) else tensor.to(self.device) for name, tensor in tensors.items()}
        info, engine = self._library.TensorInfo, self._session.engine
        shapes = [info(name, engine.get_tensor_dtype(name), tuple(held[name].shape)) for name in held]
        outputs = {
            found.name: torch.empty(tuple(found.shape), dtype=_TYPES[found.dtype.name], device=self.device)
            for found in self._session.infer_shapes(shapes)
        }
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        if not self._session.run(held, outputs, stream.cuda_stream if stream else 0):
            raise EngineError("TensorRT could not run the engine")
        if stream:
            stream.synchronize()  # the inputs must live until the engine has read them
        return outputs[LOGITS]

    def _check_tensors(self) -> None:
        """Raise ConfigError when the engine has other inputs than ours, of other types, or has no logits."""
        engine = self._session.engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        theirs = {name for name in names if engine.get_tensor_mode(name).name == "INPUT"}
        ours = step_inputs([Row([0], 0, [0], TokenTree.bare())], self.geometry, 0)
        if different := sorted(theirs ^ ours.keys()):
            raise ConfigError(
                f"the engine's inputs are not those of a tree step: {', '.join(different)} (build it again)"
            )
        for name, array in ours.items():
            kind = engine.get_tensor_dtype(name).name
            if _TYPES.get(kind) != torch.from_numpy(array).dtype:
                raise ConfigError(f"the engine's input {name} is {kind}, not {array.dtype} (build it again)")
        if LOGITS not in names or engine.get_tensor_dtype(LOGITS).name not in _TYPES:
            raise ConfigError(f"the engine has no output {LOGITS} in a type of {', '.join(_TYPES)} (build it again)")


def is_host(name: str) -> bool:
    """Return whether an input stays in host memory."""
    return name.startswith("host_") or name == USE
