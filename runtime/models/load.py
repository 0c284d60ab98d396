"""Loads a checkpoint, or refuses it with the reason if our forward pass would not reproduce the stock model's."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from orchestrator.core.deployment.gguf_file import is_gguf
from orchestrator.core.errors import ConfigError, first_line
from orchestrator.core.types import HiddenStates
from runtime.models.causal_lm import CausalModel, adapt
from runtime.models.check import check_against_stock, check_bits, products_in_bfloat16, stock_log_probs
from runtime.models.gguf import read_weights
from runtime.models.native.families import rope_types, unsupported
from runtime.models.native.model import NativeModel
from runtime.models.quantized import QuantizedMatrix, quantize_linears
from runtime.models.stock import read_pretrained, resolve

log = logging.getLogger(__name__)


class Unsupported(Exception):
    """The native forward pass lacks something that a model needs; the message says what."""


#: The key dtype → the dtype in which a checkpoint is read, and which torch computes in; int8 is for native code alone.
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}
#: Which forward pass computes a model on a CPU.
Kernels = Literal["auto", "native", "torch"]
REFUSED_ROPES = ("dynamic", "longrope")
#: Quantized weights that transformers itself turns into plain ones (gpt-oss).
READABLE_QUANTIZATIONS = ("mxfp4",)
#: Tokens of the longest pass that is run at load (torch_engine.choose_threads).
MIN_POSITIONS = 72
LAYER_TYPES = ("full_attention", "sliding_attention")


def check_device(name: str) -> None:
    """Raise ConfigError for a CUDA device on a machine without one. name: the key device of the deployment."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r}, but torch sees no CUDA device (key device in the deployment file)")


def load_model(
    folder: str,
    device_name: str,
    dtype_name: str,
    features: HiddenStates = HiddenStates.NONE,
    kernels: Kernels = "torch",
    vocab_size: int = 0,
) -> CausalModel | NativeModel:
    """Load a folder, hub id or GGUF file for our forward pass; raises ConfigError, with the reason, if that fails.

    kernels: auto = the native forward pass if it supports this model and machine and is right, else torch;
    native = the native forward pass, or the reason why it cannot be used as a ConfigError. vocab_size: rows that its
    tables are to have, those of the target that it drafts for; 0 = its own.
    """
    device, dtype = torch.device(device_name), DTYPES[dtype_name]
    if dtype_name == "int8":
        if kernels == "torch":
            raise ConfigError(
                f"{folder}: dtype = 'int8' is computed by native code alone, but kernels = 'torch' "
                "(keys dtype and kernels in the deployment file)"
            )
        kernels = "native"
    if kernels == "native" and device.type != "cpu":
        raise native_refused(folder, f"it runs on a CPU, not on {device_name}")
    source = resolve(folder)
    config = read_pretrained(AutoConfig, source)
    check_quantization(config, folder)
    if (positions := config.get_text_config().max_position_embeddings) < MIN_POSITIONS:
        raise ConfigError(
            f"{folder}: the model's context is {positions} tokens (max_position_embeddings in config.json), at least "
            f"{MIN_POSITIONS} are needed, which are checked and timed at load"
        )
    check_supported(config.get_text_config(), folder)
    model = _load_stock(source, dtype)
    fit_vocabulary(model, vocab_size)
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{folder}: {type(model).__name__} does not let its attention be replaced (_supports_attention_backend)"
        )
    try:
        native = _native(model, features, folder, kernels, dtype_name == "int8") if device.type == "cpu" else None
        return native or _adapted(_cast(model, device, dtype).eval(), features, folder)
    except ConfigError:
        raise
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{folder}: the memory of {device_name} is too small for the weights") from error
    except Exception as error:
        raise ConfigError(
            f"{folder}: {type(model).__name__} does not run with its attention replaced, so it is not "
            f"supported ({type(error).__name__}: {first_line(error)})"
        ) from error


def _cast(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move a model and cast its weights; its rotary frequencies keep the precision that the stock model gave them."""
    if device.type == "cuda":
        # cuDNN's attention, which torch prefers on some GPUs, makes a new plan for each number of cached tokens.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _adapted(model: Any, features: HiddenStates, folder: str) -> CausalModel:
    """Return the torch forward pass of a stock model, which is changed in place."""
    expected = stock_log_probs(model)
    adapted = adapt(model, features)
    check_against_stock(adapted, expected, folder)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # frees the weights that were replaced: other processes use the GPU, too
    return adapted


def _native(model: Any, features: HiddenStates, folder: str, kernels: Kernels, quantizes: bool) -> NativeModel | None:
    """Return the native forward pass of a stock model on the CPU; None, with the reason in the log, to use torch's.

    quantizes: products are of 8-bit integers. Raises ConfigError if the deployment asks for the native forward pass.
    """
    if kernels == "torch":
        return None
    try:
        if reason := unsupported(model):
            raise Unsupported(f"it does not support {reason}")
        rounds_inputs = model.dtype == torch.bfloat16
        stock = model.float().eval()
        quantized = _quantized(stock, folder) if quantizes else {}
        for parameter in stock.parameters():
            if id(parameter) in quantized:
                parameter.data = quantized[id(parameter)].dequantized()
        native = NativeModel(stock, features, rounds_inputs, quantized)
        with products_in_bfloat16(stock) if rounds_inputs else nullcontext():
            expected = stock_log_probs(stock)
        check_against_stock(native, expected, folder)
        check_bits(native, folder)
    except (Unsupported, ConfigError) as error:
        if kernels == "native":
            raise native_refused(folder, str(error)) from error
        level = logging.INFO if isinstance(error, Unsupported) else logging.WARNING
        log.log(level, "%s: torch computes this model, not the native forward pass: %s", folder, error)
        return None
    return native


def _quantized(stock: Any, folder: str) -> dict[int, QuantizedMatrix]:
    """Return the quantised matrices of a model: those of a GGUF file in its own blocks if native code has them."""
    if not is_gguf(folder):
        return quantize_linears(stock)
    names = [name for name, _ in stock.named_parameters()]
    return quantize_linears(stock, read_weights(folder).matrices(names))


def native_refused(name: str, reason: str) -> ConfigError:
    """Return the error of a model or a head that the deployment wants in native code, which cannot compute it."""
    return ConfigError(
        f"{name}: kernels = 'native', but native code cannot compute it: {reason} "
        "(key kernels in the deployment file; with 'auto', torch computes what native code cannot)"
    )


def _load_stock(source: str, dtype: torch.dtype) -> Any:
    """Load a checkpoint that has every weight; transformers only warns of missing ones and initialises them randomly.

    Eager attention is the one kind that every family has, and the only one with softcap and sinks.
    """
    # There are no fused products of experts in float64.
    options: dict[str, Any] = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = read_pretrained(AutoModelForCausalLM, source, dtype=dtype, attn_implementation="eager", **options)
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"{source}: the tensor {name} is {list(stored)} in the weights and {list(expected)} by config.json; if the "
            "vocabulary was resized, set vocab_size there to the rows of the weights"
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{source}: the checkpoint lacks {len(missing)} of the model's weights (the first: {missing[0]})"
        )
    return model


def fit_vocabulary(model: Any, vocab_size: int) -> None:
    """Give a draft model as many rows as its target has, whose tables may be padded to another size.

    Rows beyond the target's are cut, so that no draft has such an id. Further ones are copies of the last row, which is
    as improbable as the padding that it is itself.
    """
    num_rows = len(model.get_input_embeddings().weight)
    if vocab_size in (0, num_rows):
        return
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        with torch.no_grad():
            table.weight[num_rows:] = table.weight[min(num_rows, vocab_size) - 1]


def check_quantization(config: PretrainedConfig, folder: str) -> None:
    """Raise ConfigError for weights in a format of their own, which would need that format's library and kernels."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if str(method) not in READABLE_QUANTIZATIONS:
        raise ConfigError(
            f"{folder}: the weights are quantized ({method}, quantization_config in config.json), which is not read; "
            "serve the original weights, or a GGUF file of the model"
        )


def check_supported(config: PretrainedConfig, folder: str) -> None:
    """Raise ConfigError for rotations that change with the context length, and for unknown layer types."""
    if refused := rope_types(config).intersection(REFUSED_ROPES):
        raise ConfigError(
            f"{folder}: rope type {min(refused)!r} changes a key's rotation with the context length, "
            "so cached keys would be wrong"
        )
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if unknown := layers.difference(LAYER_TYPES):
        raise ConfigError(f"{folder}: layer type {min(unknown)!r} is not supported (allowed: {', '.join(LAYER_TYPES)})")
