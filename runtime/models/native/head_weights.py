"""Copies the weights of drafting heads into native code, and tells what native code lacks for a head."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import POINTER, c_char_p, c_int, c_void_p
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from native.failures import check, made
from native.head_fields import DraftingFields
from native.library import Shape, load
from runtime.models.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.models.heads.modules.layers import head_dim
from runtime.models.heads.modules.medusa import MedusaHeads
from runtime.models.heads.modules.redrafter import RedrafterHead
from runtime.models.native.rotations import Rotations
from runtime.models.native.weights import Weights
from runtime.models.quantized import Quantized, QuantizedMatrix, combined


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
    library.native_head_add_quantized.argtypes = [c_void_p, c_int, c_void_p, c_void_p, c_int, c_int]
    library.native_head_set_vector.argtypes = [c_void_p, c_char_p, c_void_p, c_int]
    library.native_eagle_set_ids.argtypes = [c_void_p, c_void_p, c_int]
    library.native_eagle_set_norms.argtypes = [c_void_p, c_int, c_int, c_int]
    library.native_head_draft.argtypes = [c_void_p, POINTER(DraftingFields)]
    for name in ("head_add_linear", "head_add_quantized", "head_set_vector", "eagle_set_ids", "head_draft"):
        getattr(library, f"native_{name}").restype = c_char_p  # what is wrong
    return library


def unsupported_head(head: nn.Module) -> str:
    """Return what native code lacks for a head, or "" if nothing."""
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


class HeadWeights:
    """Copies heads for which `unsupported_head` returns ""; the products of a head in bfloat16 are in bfloat16.

    max_threads: maximum threads of a draft. quantized: the matrices that are copied in quantised form.
    """

    def __init__(self, library: ctypes.CDLL, max_threads: int, quantized: Quantized) -> None:
        self._library, self._max_threads, self._quantized = library, max_threads, quantized
        self._rounds_inputs = False

    def copy(self, head: nn.Module) -> tuple[c_void_p, Rotations | None]:
        """Return the head in native code, which the caller must delete, and its rotations if it has attention."""
        self._rounds_inputs = next(iter(head.parameters())).dtype == torch.bfloat16
        if isinstance(head, MedusaHeads):
            return c_void_p(self._new_medusa(head)), None
        if isinstance(head, RedrafterHead):
            return c_void_p(self._new_redrafter(head)), None
        assert isinstance(head, EagleHead | Eagle3Head)
        layer: Any = head.midlayer if isinstance(head, Eagle3Head) else head.layers[0]
        return c_void_p(self._new_eagle(head, layer)), Rotations(layer.self_attn.rotary)

    def _new_medusa(self, head: MedusaHeads) -> int:
        stacks: list[Any] = list(head)
        blocks = [[block.linear for block in one[:-1]] for one in stacks]
        outputs = list({id(one[-1]): one[-1] for one in stacks}.values())  # one for each head, or one for all
        width = outputs[0].in_features
        sizes = width, head.vocab_size, len(blocks), len(blocks[0])
        handle = made(self._library.native_medusa_new(*sizes, self._max_threads), "a head")
        self._add_linears(handle, [*(linear for one in blocks for linear in one), *outputs])
        return handle

    def _new_redrafter(self, head: RedrafterHead) -> int:
        embedding = head.get_buffer("embedding")
        layers: list[Any] = list(head.lm_head)
        exit_dim = layers[-1].in_features
        sizes = embedding.shape[1], len(embedding), exit_dim, head.rnn
        handle = made(self._library.native_redrafter_new(*sizes, self._max_threads), "a head")
        if head.rnn:
            both = [head.rnn_w.weight, head.rnn_u.weight]
            self._add_linear(handle, combined(self._quantized, partial(torch.cat, dim=1), both), head.rnn_u.bias)
        if hasattr(head, "input_proj"):
            self._add_linears(handle, [head.input_proj])
        self._add_linears(handle, [*(block.linear for block in layers[:-1]), layers[-1]])
        self._set_vector(handle, "embedding", embedding)
        return handle

    def _new_eagle(self, head: EagleHead | Eagle3Head, layer: Any) -> int:
        config, embedding, fuses = head.config, head.get_buffer("embedding"), isinstance(head, Eagle3Head)
        output: Any = head.lm_head if isinstance(head, Eagle3Head) else head.output
        shape = Shape(
            1, config.hidden_size, config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads,
            head_dim(config), config.intermediate_size, output.out_features, config.rms_norm_eps,
            head_dim(config) ** -0.5, rounds_inputs=self._rounds_inputs,
        )  # fmt: skip
        reads_token = not isinstance(head, EagleHead) or head.reads_token
        sizes = head.feature_width, len(embedding), fuses, reads_token
        handle = made(self._library.native_eagle_new(ctypes.byref(shape), *sizes, self._max_threads), "a head")
        self._add_linears(handle, [head.fc])
        self._set_vector(handle, "embedding", embedding)
        layer_handle = ctypes.c_void_p(self._library.native_eagle_layer(handle))
        weights = Weights(self._library, layer_handle, self._quantized)
        weights.set_decoder_layer(0, layer)
        weights.set_linear(-1, "lm_head", output.weight)
        if isinstance(head, Eagle3Head):
            weights.set_vector(-1, "final_norm", head.norm.weight)
            self._set_vector(handle, "input_norm", head.midlayer.input_layernorm.weight)
            self._set_vector(handle, "hidden_norm", head.midlayer.hidden_norm.weight)
            ids = head.ids.int().contiguous()
            check(self._library.native_eagle_set_ids(handle, ids.data_ptr(), len(ids)), "copying the draft vocabulary")
            self._set_norms(handle, head)
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
            self._add_linear(handle, self._quantized.get(id(linear.weight), linear.weight), linear.bias)

    def _add_linear(self, handle: int, weight: Tensor | QuantizedMatrix, bias: Tensor | None) -> None:
        offsets = None if bias is None else _floats(bias)
        pointer = None if offsets is None else offsets.data_ptr()
        if isinstance(weight, QuantizedMatrix):
            blocks = weight.blocks.contiguous()
            arguments = weight.number, blocks.data_ptr(), pointer, *weight.shape
            wrong = self._library.native_head_add_quantized(handle, *arguments)
        else:
            values = _floats(weight)
            sizes = *values.shape, self._rounds_inputs
            wrong = self._library.native_head_add_linear(handle, values.data_ptr(), pointer, *sizes)
        check(wrong, "copying a matrix")

    def _set_vector(self, handle: int, name: str, vector: Tensor) -> None:
        values = _floats(vector)
        wrong = self._library.native_head_set_vector(handle, name.encode(), values.data_ptr(), values.numel())
        check(wrong, f"copying the vector {name!r}")


def _floats(tensor: Tensor) -> Tensor:
    """Return the tensor as contiguous float32, as C reads it."""
    return tensor.detach().float().contiguous()
