"""Drafting heads in native code on the CPU: one call drafts the trees of several requests.

Invariant: a tree depends on the head and on its own request alone, bit for bit, whatever shares the call.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from orchestrator.core.errors import EngineError
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Distribution, DraftResponse, Features, IdArray
from orchestrator.sampling.sampled_drafts import MAX_CANDIDATES
from runtime.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.heads.modules.layers import head_dim
from runtime.heads.modules.medusa import MedusaHeads
from runtime.heads.modules.redrafter import RedrafterHead
from runtime.kv.cache import KVCache
from runtime.native.head_fields import DraftCallFields, DraftingFields
from runtime.native.library import Shape, load
from runtime.native.ranking import ranking_of
from runtime.native.rotations import Rotations
from runtime.native.threads import ThreadChoice, available_threads
from runtime.native.weights import Weights

#: Threads that a draft can use.
MAX_THREADS = 4


@dataclass(frozen=True, eq=False)
class NativeDraft:
    """What a head needs to draft for one request.

    position: of the tokens below the root. choices: the shape of a static tree; bare for a dynamic one of `width`.
    tokens: of the context rows to read, the root last. features: the target's, a row for each of them.
    max_s: no level is begun that would end later, in seconds from now. min_score: the least log-confidence of a path.
    draws: the nodes are sampled from q. sharpness: of the confidences by which the tree grows.
    A head with a cache also has its blocks, the slot of the first row, and the slots that hold no row.
    """

    sampling: Sampling
    position: int
    max_nodes: int
    max_depth: int
    width: int
    choices: TokenTree
    tokens: Sequence[int]
    features: Features
    max_s: float
    blocks: Sequence[int] = ()
    first_slot: int = 1
    gap: range = range(0)
    min_score: float = -math.inf
    draws: bool = False
    sharpness: float = 1.0


@cache
def load_heads() -> ctypes.CDLL:
    """Return the library with the argument types of its heads; raises Unbuilt when it cannot be built or loaded."""
    library = load()
    for name, arguments in (
        ("native_medusa_new", [c_int] * 5),
        ("native_redrafter_new", [c_int] * 5),
        ("native_eagle_new", [POINTER(Shape), *[c_int] * 5]),
        ("native_eagle_layer", [c_void_p]),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_void_p
    library.native_head_delete.argtypes = [c_void_p]
    library.native_head_add_linear.argtypes = [c_void_p, c_void_p, c_void_p, c_int, c_int, c_int]
    library.native_head_set_vector.argtypes = [c_void_p, c_char_p, c_void_p, c_int]
    library.native_eagle_set_ids.argtypes = [c_void_p, c_void_p, c_int]
    library.native_eagle_set_norms.argtypes = [c_void_p, c_int, c_int, c_int]
    library.native_head_draft.argtypes = [c_void_p, POINTER(DraftingFields)]
    library.native_head_draft.restype = c_char_p
    return library


def unsupported_head(head: nn.Module) -> str:
    """Return what the native code lacks for a head, or an empty string."""
    weight = next(iter(head.parameters()))
    lacks = {f"{weight.dtype} on {weight.device}": weight.dtype == torch.float64 or weight.device.type != "cpu"}
    if isinstance(head, EagleHead | Eagle3Head):
        config = head.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        lacks |= {
            f"heads of {head_dim(config)} numbers": head_dim(config) % 16 != 0,
            f"a hidden size of {config.hidden_size}": config.hidden_size % 16 != 0,
            "biases of the MLP": bool(config.mlp_bias),
            f"the rope type {rope!r}": rope not in ("default", "linear", "llama3"),
        }
    else:
        widths = {module.out_features for module in head.modules() if isinstance(module, nn.Linear)}
        widths.discard(getattr(head, "vocab_size", 0))
        lacks |= {f"layers of {width} numbers": width % 16 != 0 for width in widths}
    return next((name for name, is_lacking in lacks.items() if is_lacking), "")


class NativeHead:
    """A head whose `unsupported_head` is empty; its weights are copied. Of a head in bfloat16 the products are in it.

    num_threads: of the next call, at most MAX_THREADS; None = chosen for each call by measurement. call_s: seconds of
    the last call.
    """

    def __init__(self, head: nn.Module) -> None:
        self.num_threads: int | None = None
        self._choice = ThreadChoice(min(available_threads(), MAX_THREADS))
        self.call_s = 0.0
        self._library = load_heads()
        self._rotations: Rotations | None = None
        self._rounds_inputs = next(iter(head.parameters())).dtype == torch.bfloat16
        self._selection_s = c_double()
        self._handle = ctypes.c_void_p(self._new(head))

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.native_head_delete(handle)

    @property
    def selection_s(self) -> float:
        """Seconds of the last call that went into ranking tokens and choosing nodes."""
        return self._selection_s.value

    def draft(self, drafts: Sequence[NativeDraft], cache: KVCache | None = None) -> list[DraftResponse]:
        """Return the draft of each request. cache: of a head that has one; its features hold the head's outputs."""
        calls = (DraftCallFields * len(drafts))()
        choices: list[TokenTree] = []
        blocks: list[int] = []
        tokens: list[int] = []
        num_choices = 0
        for call, draft in zip(calls, drafts, strict=True):
            _fill(call, draft)
            call.first_row, call.first_block, call.first_choice = len(tokens), len(blocks), num_choices
            tokens += draft.tokens
            blocks += draft.blocks
            if draft.choices.num_nodes:
                choices.append(draft.choices)
                num_choices += draft.choices.num_nodes
        features = np.concatenate([draft.features for draft in drafts])
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": np.array(tokens, np.int32),
            "blocks": np.array(blocks, np.int32),
            "choice_parents": _joined(tree.parents for tree in choices),
            "choice_ranks": _joined(tree.tokens for tree in choices),
            "features": np.ascontiguousarray(features, np.float32),
            "tree_sizes": np.empty(len(drafts), np.int32),
            "tree_tokens": np.empty((len(drafts), MAX_NODES), np.int32),
            "tree_parents": np.empty((len(drafts), MAX_NODES), np.int32),
        }
        if any(draft.draws for draft in drafts):
            shape = len(drafts), MAX_NODES + 1
            arrays["q_sizes"] = np.zeros(shape, np.int32)
            arrays["q_tokens"] = np.empty((*shape, MAX_CANDIDATES), np.int32)
            arrays["q_weights"] = np.empty((*shape, MAX_CANDIDATES), np.float32)
        num_threads = self.num_threads or self._choice.choose(len(tokens))
        fields = DraftingFields(
            num_calls=len(drafts),
            num_threads=num_threads,
            num_rows=len(tokens),
            num_choices=num_choices,
            num_blocks=len(blocks),
            max_tree=MAX_NODES,
            calls=ctypes.addressof(calls),
            selection_s=ctypes.addressof(self._selection_s),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        if cache is not None:
            self._describe_cache(fields, cache, max(draft.position + draft.max_depth for draft in drafts))
        began_s = time.perf_counter()
        wrong = self._library.native_head_draft(self._handle, ctypes.byref(fields))
        self.call_s = time.perf_counter() - began_s
        if wrong:
            raise EngineError(f"the native head refused its arguments: {wrong.decode()}")
        if self.num_threads is None:
            self._choice.observe(len(tokens), num_threads, self.call_s)
        return [_drafted(arrays, place, draft.draws) for place, draft in enumerate(drafts)]

    def _describe_cache(self, fields: DraftingFields, cache: KVCache, num_positions: int) -> None:
        assert self._rotations is not None
        self._rotations.reach(num_positions)
        fields.cosines, fields.sines = (table.ctypes.data for table in (self._rotations.cosines, self._rotations.sines))
        fields.num_positions = len(self._rotations.cosines)
        fields.cache, fields.states = cache.kv.data_ptr(), cache.features.data_ptr()
        fields.num_slots, fields.block_tokens = cache.kv.shape[3], cache.block_tokens

    def _new(self, head: nn.Module) -> int:
        if isinstance(head, MedusaHeads):
            return self._new_medusa(head)
        if isinstance(head, RedrafterHead):
            return self._new_redrafter(head)
        assert isinstance(head, EagleHead | Eagle3Head)
        return self._new_eagle(head)

    def _new_medusa(self, head: MedusaHeads) -> int:
        stacks: list[Any] = list(head)
        blocks = [[block.linear for block in one[:-1]] for one in stacks]
        outputs = list({id(one[-1]): one[-1] for one in stacks}.values())  # one of each head's own, or one for all
        width = outputs[0].in_features
        handle: int = self._library.native_medusa_new(width, head.vocab_size, len(blocks), len(blocks[0]), MAX_THREADS)
        self._add_linears(handle, [*(linear for one in blocks for linear in one), *outputs])
        return handle

    def _new_redrafter(self, head: RedrafterHead) -> int:
        embedding = head.get_buffer("embedding")
        layers: list[Any] = list(head.lm_head)
        exit_dim = layers[-1].in_features
        handle: int = self._library.native_redrafter_new(
            embedding.shape[1], len(embedding), exit_dim, head.rnn, MAX_THREADS
        )
        if head.rnn:
            both = torch.cat([head.rnn_w.weight, head.rnn_u.weight], dim=1)
            self._add_linear(handle, both, head.rnn_u.bias)
        if hasattr(head, "input_proj"):
            self._add_linears(handle, [head.input_proj])
        self._add_linears(handle, [*(block.linear for block in layers[:-1]), layers[-1]])
        self._set_vector(handle, "embedding", embedding)
        return handle

    def _new_eagle(self, head: EagleHead | Eagle3Head) -> int:
        config, embedding, fuses = head.config, head.get_buffer("embedding"), isinstance(head, Eagle3Head)
        output: Any = head.lm_head if isinstance(head, Eagle3Head) else head.output
        shape = Shape(
            1, config.hidden_size, config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads,
            head_dim(config), config.intermediate_size, output.out_features, config.rms_norm_eps,
            head_dim(config) ** -0.5, rounds_inputs=self._rounds_inputs,
        )  # fmt: skip
        reads_token = not isinstance(head, EagleHead) or head.reads_token
        handle: int = self._library.native_eagle_new(
            ctypes.byref(shape), head.feature_width, len(embedding), fuses, reads_token, MAX_THREADS
        )
        self._add_linears(handle, [head.fc])
        self._set_vector(handle, "embedding", embedding)
        layer: Any = head.midlayer if isinstance(head, Eagle3Head) else head.layers[0]
        weights = Weights(self._library, ctypes.c_void_p(self._library.native_eagle_layer(handle)))
        weights.set_decoder_layer(0, layer)
        weights.set_linear(-1, "lm_head", output.weight)
        if isinstance(head, Eagle3Head):
            weights.set_vector(-1, "final_norm", head.norm.weight)
            self._set_vector(handle, "input_norm", head.midlayer.input_layernorm.weight)
            self._set_vector(handle, "hidden_norm", head.midlayer.hidden_norm.weight)
            ids = head.ids.int().contiguous()
            self._library.native_eagle_set_ids(handle, ids.data_ptr(), len(ids))
            self._set_norms(handle, head)
        self._rotations = Rotations(layer.self_attn.rotary)
        return handle

    def _set_norms(self, handle: int, head: Eagle3Head) -> None:
        norms: list[Any] = []
        if head.norms.fc_norm:
            norms = list(head.fc_norm)
        elif head.norms.norm_before_fc:
            norms = [head.input_norm]
        if norms:
            self._set_vector(handle, "feature_norm", torch.cat([norm.weight for norm in norms]))
        self._library.native_eagle_set_norms(
            handle, max(len(norms), 1), head.norms.norm_before_residual, head.norms.norm_output
        )

    def _add_linears(self, handle: int, linears: Iterable[Any]) -> None:
        for linear in linears:
            self._add_linear(handle, linear.weight, linear.bias)

    def _add_linear(self, handle: int, weight: Tensor, bias: Tensor | None) -> None:
        values, offsets = _floats(weight), None if bias is None else _floats(bias)
        pointer = None if offsets is None else offsets.data_ptr()
        self._library.native_head_add_linear(handle, values.data_ptr(), pointer, *values.shape, self._rounds_inputs)

    def _set_vector(self, handle: int, name: str, vector: Tensor) -> None:
        values = _floats(vector)
        if self._library.native_head_set_vector(handle, name.encode(), values.data_ptr(), values.numel()):
            raise EngineError(f"the native head has no vector {name!r}")


def _floats(tensor: Tensor) -> Tensor:
    """Return the numbers as float32, as they lie in memory for C."""
    return tensor.detach().float().contiguous()


def _drafted(arrays: Mapping[str, npt.NDArray[Any]], place: int, draws: bool) -> DraftResponse:
    """Return the draft of the request at this place of the arrays."""
    size = int(arrays["tree_sizes"][place])
    parents = arrays["tree_parents"][place, :size].copy()
    tree = TokenTree(arrays["tree_tokens"][place, :size].copy(), parents)
    if not draws:
        return DraftResponse(tree)
    q = {}
    for parent in set(parents.tolist()):
        count = int(arrays["q_sizes"][place, parent])
        tokens, weights = (arrays[name][place, parent, :count] for name in ("q_tokens", "q_weights"))
        ascending = np.argsort(tokens)
        q[parent] = Distribution(tokens[ascending], weights[ascending])
    return DraftResponse(tree, tuple(q[parent] for parent in parents.tolist()))


def _fill(call: DraftCallFields, draft: NativeDraft) -> None:
    """Set the fields that do not depend on the other requests."""
    call.ranking = ranking_of(draft.sampling, draft.sharpness, draft.draws, draft.position)
    call.max_s, call.min_score = draft.max_s, draft.min_score
    call.position, call.root = draft.position, draft.tokens[-1]
    call.max_nodes, call.max_depth, call.width = draft.max_nodes, draft.max_depth, draft.width
    call.num_choices, call.num_rows, call.num_blocks = draft.choices.num_nodes, len(draft.tokens), len(draft.blocks)
    call.first_slot, call.gap_start, call.gap_stop = draft.first_slot, draft.gap.start, draft.gap.stop


def _joined(arrays: Iterable[IdArray]) -> npt.NDArray[np.int32]:
    """Return int32 arrays one after the other; there may be none."""
    return np.concatenate([np.empty(0, np.int32), *arrays])
