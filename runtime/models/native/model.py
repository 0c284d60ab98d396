"""A decoder whose forward pass runs in native code on the CPU, with products in float32, bfloat16 or 8 bits.

Invariant: the logits of a row depend only on the weights and the row's own tokens by position, bit for bit: not on the
other rows of the pass, the tree around the row, the cache, how a prompt was cut, or the threads.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from native.chains import ChainFields, ChainsFields, NativeChain
from native.failures import check, made
from native.library import PassArrays, load
from native.ranking import ranking_of
from native.threads import ThreadChoice, available_threads
from orchestrator.core.types import HiddenStates
from runtime.engine.kv.batch import MAX_PASS_ROWS, Pass, Segment
from runtime.engine.kv.cache import CacheShape, KVCache
from runtime.models.features import FeatureColumns
from runtime.models.native.cache import NativeCache
from runtime.models.native.decoding import Decoded, Decoding, DecodingCall, DecodingFields
from runtime.models.native.draft_calls import NativeDraft
from runtime.models.native.drafters import NativeDrafter
from runtime.models.native.families import norm_weight, norms_of, rotations, shape_of, windows
from runtime.models.native.weights import Weights
from runtime.models.quantized import Quantized

#: A pass can use at least this many threads, even on a machine with fewer cores.
MIN_POOL_THREADS = 4


class NativeModel:
    """The forward pass of one model over a `Pass`; has the interface of `runtime.models.causal_lm.CausalModel`.

    num_threads: threads of the next pass, at most max_threads; None = chosen for each pass by measurement.
    dtype: the type of the cache and the logits. rounds_inputs: see __init__. is_quantized: whether any matrix is.
    """

    kernels = "native"

    def __init__(
        self, model: Any, features: HiddenStates, rounds_inputs: bool = False, quantized: Quantized | None = None
    ) -> None:
        """model: a stock transformers model for which `families.unsupported` is empty; its weights are copied.

        rounds_inputs: weights and inputs of the products are rounded to bfloat16; sums, cache and logits are float32.
        quantized: the quantised form of matrices; the inputs of their products are rounded to 8 bits.
        """
        config = model.config.get_text_config()
        columns = FeatureColumns(config, features)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.rounds_inputs, self.is_quantized = rounds_inputs, bool(quantized)
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.has_windows = any(windows(config))
        self.feature_columns = columns.columns
        self.max_threads = max(available_threads(), MIN_POOL_THREADS)
        self.num_threads: int | None = None
        # Rows of prompts and rows of steps differ in what they read, so `decode` chooses separately.
        self._choice, self._decode_choice = ThreadChoice(available_threads()), ThreadChoice(available_threads())
        shape = shape_of(model, rounds_inputs)
        self.cache_shape = CacheShape(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, columns.num_states * config.hidden_size
        )
        self._library = load()
        self._handle = ctypes.c_void_p(made(self._library.native_new(ctypes.byref(shape), self.max_threads), "a model"))
        self._copy_weights(model, columns, quantized or {})

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.native_delete(handle)

    def prepare(self) -> None:
        """Do nothing: no thread needs preparation."""

    def new_cache(self, memory_mb: int, block_tokens: int) -> NativeCache:
        """Return empty blocks of `block_tokens` tokens each."""
        return NativeCache(self.cache_shape, memory_mb, block_tokens)

    def forward(self, batch: Pass[Segment], cache: KVCache) -> Tensor:
        """Compute a pass and write its keys, values and features to the cache, one of `new_cache`.

        Returns logits (rows, V) float32 of every root and node.
        """
        return self._compute(batch, cache, self._library.native_forward_segments)

    def draft_chains(self, batch: Pass[Segment], cache: KVCache, chains: Sequence[NativeChain]) -> list[list[int]]:
        """Compute a pass over contexts, then draft the chains after its segments; return the tokens of each chain.

        Keys and values are computed for all drafts of a chain but the last.
        """
        fields = (ChainFields * len(chains))(
            *(
                ChainFields(ranking_of(each.sampling, each.sharpness), each.min_score, each.segment, each.length)
                for each in chains
            )
        )
        longest = max(chain.length for chain in chains)
        tokens, lengths = (ctypes.c_int32 * (len(chains) * longest))(), (ctypes.c_int32 * len(chains))()
        addresses = [ctypes.addressof(each) for each in (fields, tokens, lengths)]
        request = ChainsFields(len(chains), longest, *addresses)
        self._compute(batch, cache, self._library.native_draft_chains, request)
        return [tokens[place * longest :][:length] for place, length in enumerate(lengths)]

    def burst_drafter(self, drafts: Sequence[NativeDraft], cache: KVCache) -> NativeDrafter:
        """Return what native code needs to call the model in a burst, as the target's draft model."""
        num_threads = self.num_threads or self._choice.choose(len(drafts))
        note_time = None if self.num_threads else self._choice.observe
        return NativeDrafter(drafts, cache, self.max_positions, num_threads, note_time, model=self._handle)

    def decode(self, batch: Pass[Segment], cache: KVCache, decoding: Decoding) -> Decoded:
        """Run a burst: a pass with one row and a tree for each segment, and the steps after it."""
        num_rows = sum(segment.tree.num_nodes + 1 for segment in batch.segments)
        call = DecodingCall(decoding, num_rows - len(batch.segments), self.vocab_size, *self._decode_threads())
        self._compute(batch, cache, self._library.native_decode, call.fields, call.max_logits)
        decoded = call.decoded
        if self.num_threads is None:
            for num_nodes, (pass_us, _, _, num_threads) in zip(
                decoded.num_nodes.sum(1).tolist(), decoded.figures.tolist(), strict=True
            ):
                self._decode_choice.observe(num_rows, num_threads, 1e-6 * pass_us)
                num_rows = len(batch.segments) + num_nodes
        if len(decoding.drafters.drafters) == 1:
            has_drafted = decoded.num_nodes.sum(1) > 0  # else nothing may have been asked for, which takes no time
            decoding.drafters.drafters[0].note_times(decoded.figures[has_drafted, 2].tolist())
        return decoded

    def _decode_threads(self) -> tuple[list[int], list[int]]:
        """Return the threads of passes by the bit length of their number of rows, and those of the first such pass."""
        sizes = [1 << bits >> 1 or 1 for bits in range(MAX_PASS_ROWS.bit_length() + 1)]
        if self.num_threads:
            return [self.num_threads] * len(sizes), [self.num_threads] * len(sizes)
        choice = self._decode_choice
        return [choice.best(size) for size in sizes], [choice.choose(size) for size in sizes]

    def _compute(
        self,
        batch: Pass[Segment],
        cache: KVCache,
        function: Any,
        more: DecodingFields | ChainsFields | None = None,
        max_logits: int = 0,
    ) -> Tensor:
        """Call the library's function on a pass; return the logits of every root and node.

        max_logits: minimum rows of the returned array, if later passes of the call may need more.
        """
        integers = PassIntegers(batch)
        num_rows = len(integers.ids)
        is_burst = isinstance(more, DecodingFields)  # it chooses the threads of each of its passes
        num_threads = 1 if is_burst else self.num_threads or self._choice.choose(num_rows)
        logits = torch.empty((max(integers.num_logits, max_logits), self.vocab_size))
        request = PassArrays(
            num_segments=len(batch.segments),
            num_rows=num_rows,
            num_logits=integers.num_logits,
            num_blocks=len(integers.blocks),
            num_nodes=len(integers.parents),
            block_tokens=cache.block_tokens,
            num_slots=cache.kv.shape[3],
            feature_width=cache.features.shape[1],
            num_threads=num_threads,
            segments=_address(integers.segments),
            ids=_address(integers.ids),
            blocks=_address(integers.blocks),
            parents=_address(integers.parents),
            cache=cache.kv.data_ptr(),
            features=cache.features.data_ptr(),
            logits=logits.data_ptr(),
        )
        began_s = time.perf_counter()
        wrong = function(self._handle, ctypes.byref(request), *([ctypes.byref(more)] if more else []))
        check(wrong, "the forward pass")
        if self.num_threads is None and not is_burst:
            self._choice.observe(num_rows, num_threads, time.perf_counter() - began_s)
        return logits

    def _copy_weights(self, model: Any, columns: FeatureColumns, quantized: Quantized) -> None:
        config, decoder = model.config.get_text_config(), model.get_decoder()
        family, weights = config.model_type, Weights(self._library, self._handle, quantized)
        for index, (layer, window) in enumerate(zip(decoder.layers, windows(config), strict=True)):
            weights.set_decoder_layer(index, layer)
            for name, norm in norms_of(layer, family).items():
                weights.set_vector(index, name, norm)
            self._library.native_set_layer(self._handle, index, window, columns.column_of_layer(index))
        for number, rotation in enumerate(rotations(model)):
            pointer, size = rotation.frequencies.data_ptr(), len(rotation.frequencies)
            check(self._library.native_add_rotation(self._handle, pointer, size, rotation.scale), "a rotation")
            for index in rotation.layers:
                self._library.native_set_rotation(self._handle, index, number)
        embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if embedding is not lm_head:
            weights.set_linear(-1, "embedding", embedding)
        weights.set_vector(-1, "final_norm", norm_weight(decoder.norm, family))
        weights.set_linear(-1, "lm_head", lm_head)
        self._library.native_set_layer(self._handle, -1, 0, 0 if columns.num_last else -1)


class PassIntegers:
    """The int32 arrays of a pass as C reads them; see `PassArrays`."""

    def __init__(self, batch: Pass[Segment]) -> None:
        self.segments, self.ids, self.blocks, self.parents = array("i"), array("i"), array("i"), array("i")
        for segment in batch.segments:
            tree, sequence = segment.tree, segment.sequence
            self.segments.extend((segment.first, segment.last, tree.num_nodes, len(sequence.blocks)))
            self.ids.extend(sequence.ids[segment.first : segment.last])
            self.blocks.extend(sequence.blocks)
            if tree.num_nodes:
                self.ids.frombytes(tree.tokens.tobytes())
                self.parents.frombytes(tree.parents.tobytes())
        self.num_logits = len(batch.segments) + len(self.parents)


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
