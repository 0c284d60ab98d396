"""A Llama-like model whose forward pass runs in native code on the CPU, in float32.

Invariant: the logits of a row depend on the weights and on the row's own tokens by position, bit for bit. They do not
depend on the other rows of the pass, the tree around the row, the cache, how a prompt was cut, or the threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from orchestrator.core.errors import EngineError
from orchestrator.core.types import HiddenStates
from runtime.kv.batch import Pass, Segment
from runtime.kv.cache import CacheShape, KVCache
from runtime.model.features import FeatureColumns
from runtime.native.library import PassArrays, Shape, load
from runtime.native.rotations import Rotations
from runtime.native.weights import Weights

Ints = npt.NDArray[np.int32]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3")
MAX_HEAD_DIM = 512
#: Threads that a pass can use, on a machine with fewer cores too.
MIN_POOL_THREADS = 4


def head_dim_of(config: Any) -> int:
    """Return the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def unsupported(model: Any) -> str:
    """Return what the native forward pass lacks for a stock transformers model, or an empty string."""
    config = model.config.get_text_config()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    head_dim = head_dim_of(config)
    if config.model_type not in FAMILIES:
        return f"the family {config.model_type!r} (it has {', '.join(FAMILIES)})"
    layer = model.get_decoder().layers[0]
    lacks = {
        f"{model.dtype} on {model.device}": model.dtype != torch.float32 or model.device.type != "cpu",
        f"the rope type {rope!r}": rope not in ROPES,
        f"the activation {config.hidden_act!r}": config.hidden_act != "silu",
        f"heads of {head_dim} numbers": head_dim % 16 != 0 or head_dim > MAX_HEAD_DIM,
        f"a hidden size of {config.hidden_size}": config.hidden_size % 16 != 0,
        "biases of o_proj": layer.self_attn.o_proj.bias is not None,
        "biases of the MLP": layer.mlp.down_proj.bias is not None,
    }
    return next((name for name, is_lacking in lacks.items() if is_lacking), "")


class NativeModel:
    """The forward pass of one model over a `Pass`; has the surface of `runtime.model.causal_lm.CausalModel`.

    num_threads: threads of the next pass, at most max_threads.
    """

    def __init__(self, model: Any, features: HiddenStates) -> None:
        """model: a stock transformers model for which `unsupported` is empty; its weights are copied."""
        config = model.config.get_text_config()
        columns = FeatureColumns(config, features)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.feature_columns = columns.columns
        self.max_threads = max(os.cpu_count() or 1, MIN_POOL_THREADS)
        self.num_threads = 1
        self.cache_shape = CacheShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim_of(config),
            feature_width=columns.num_states * config.hidden_size,
        )
        self._library = load()
        shape = Shape(
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            head_dim_of(config), config.intermediate_size, config.vocab_size, config.rms_norm_eps,
            model.get_decoder().layers[0].self_attn.scaling,
        )  # fmt: skip
        self._handle = ctypes.c_void_p(self._library.native_new(ctypes.byref(shape), self.max_threads))
        self._weights = Weights(self._library, self._handle)
        self._copy_weights(model, columns)
        self._rotations = Rotations(model.get_decoder().rotary_emb)

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.native_delete(handle)

    def prepare(self) -> None:
        """Nothing is needed per thread."""

    def new_cache(self, memory_mb: int, block_tokens: int) -> KVCache:
        """Return empty blocks of `block_tokens` tokens each."""
        return KVCache(self.cache_shape, memory_mb, block_tokens, self.dtype, self.device)

    def forward(self, batch: Pass[Segment], cache: KVCache) -> Tensor:
        """Compute a pass and write its keys, values and features to the cache.

        Returns logits (rows, V) float32 of every root and node.
        """
        arrays = visible_slots(batch.segments, cache.block_tokens)
        arrays["ids"] = batch.ids[0].numpy().astype(np.int32)
        positions = batch.positions[0].numpy()
        self._rotations.reach(int(positions.max()))
        cosines, sines = self._rotations.cosines[positions], self._rotations.sines[positions]
        logits = torch.empty((len(arrays["logit_rows"]), self.vocab_size))
        request = PassArrays(
            num_rows=len(arrays["ids"]),
            num_logits=len(logits),
            num_context_slots=len(arrays["context_slots"]),
            num_extra_slots=len(arrays["extra_slots"]),
            num_slots=cache.kv.shape[3],
            feature_width=cache.features.shape[1],
            num_threads=self.num_threads,
            **{name: array.ctypes.data for name, array in arrays.items()},
            cosines=cosines.ctypes.data,
            sines=sines.ctypes.data,
            cache=cache.kv.data_ptr(),
            features=cache.features.data_ptr(),
            logits=logits.data_ptr(),
        )
        if wrong := self._library.native_forward(self._handle, ctypes.byref(request)):
            raise EngineError(f"the native forward pass refused its arguments: {wrong.decode()}")
        return logits

    def _copy_weights(self, model: Any, columns: FeatureColumns) -> None:
        config, decoder = model.config.get_text_config(), model.get_decoder()
        # A configuration without kinds of layers (Mistral's) means that all of them slide if there is a window.
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(decoder.layers)
        for index, layer in enumerate(decoder.layers):
            self._copy_layer(index, layer)
            window = getattr(config, "sliding_window", None) if kinds[index] == "sliding_attention" else None
            self._library.native_set_layer(self._handle, index, window or 0, columns.column_of_layer(index))
        self._weights.set_vector(-1, "embedding", model.get_input_embeddings().weight)
        self._weights.set_vector(-1, "final_norm", decoder.norm.weight)
        self._weights.set_linear(-1, "lm_head", model.get_output_embeddings().weight)
        self._library.native_set_layer(self._handle, -1, 0, 0 if columns.num_last else -1)

    def _copy_layer(self, index: int, layer: Any) -> None:
        self._weights.set_decoder_layer(index, layer)
        self._weights.set_vector(index, "input_norm", layer.input_layernorm.weight)
        if hasattr(layer.self_attn, "q_norm"):
            self._weights.set_vector(index, "query_norm", layer.self_attn.q_norm.weight)
            self._weights.set_vector(index, "key_norm", layer.self_attn.k_norm.weight)


def visible_slots(segments: Sequence[Segment], block_tokens: int) -> dict[str, Ints]:
    """Return the integer arrays of `PassArrays` except the ids: which slots each row writes and sees.

    A row sees a run of its context's slots, then its ancestors' and its own. Node numbers ascend with depth along a
    path, so both parts are in order of position.
    """
    parts: list[dict[str, Ints]] = []
    num_context_slots = num_rows = 0
    for segment in segments:
        blocks = np.array(segment.sequence.blocks, np.int32)[:, None]
        slots = (blocks * block_tokens + np.arange(block_tokens, dtype=np.int32)).reshape(-1)
        ancestors = segment.tree.mask[1:, 1:]
        context = np.arange(segment.first + 1, segment.last + 1)
        rows = {
            "slots": slots[segment.first : segment.num_slots],
            "context_starts": np.full(segment.num_tokens, num_context_slots),
            "context_lens": np.append(context, np.full(segment.tree.num_nodes, segment.last)),
            "context_slots": slots[: segment.last],
            "extra_starts": np.append(np.zeros(segment.num_context), ancestors.sum(axis=1)),  # counts, summed below
            "extra_slots": slots[segment.last + ancestors.nonzero()[1]],
            "logit_rows": np.arange(segment.num_context - 1, segment.num_tokens) + num_rows,
        }
        parts.append({name: array.astype(np.int32) for name, array in rows.items()})
        num_context_slots += segment.last
        num_rows += segment.num_tokens
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    arrays["extra_starts"] = np.append(0, arrays["extra_starts"].cumsum()).astype(np.int32)
    return arrays
