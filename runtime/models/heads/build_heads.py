"""Builds the warm engine of a drafting head from a deployment's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from native.compiling import Unbuilt
from orchestrator.core.context import Context
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import ConfigError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.static_trees import tree_of_choices
from orchestrator.core.types import HeadInput
from runtime.engine.thread import EngineThread
from runtime.models.fused import compile_kernels, pack_linears
from runtime.models.heads.checkpoint.load import load_head
from runtime.models.heads.engines.base import HeadEngine
from runtime.models.heads.engines.eagle import EagleEngine
from runtime.models.heads.engines.medusa import MedusaEngine
from runtime.models.heads.engines.redrafter import RedrafterEngine
from runtime.models.load import DTYPES, check_device, native_refused
from runtime.models.native.head_weights import unsupported_head
from runtime.models.native.heads import NativeHead
from runtime.models.quantized import quantize_linears
from runtime.models.stock import read_pretrained

log = logging.getLogger(__name__)

#: Kernels are compiled for up to this many rows, one tree level of several requests; more rows are rare.
MAX_PREPARED_ROWS = 64


def _eagle(head: Any, config: ServingConfig, native: NativeHead | None) -> HeadEngine:
    # The head has one layer where the target has `depth`, so 1/depth of the memory holds about as many tokens.
    depth = read_pretrained(AutoConfig, config.target).get_text_config().num_hidden_layers
    memory_mb = max(config.kv_memory_mb // depth, 1)
    return EagleEngine(head, memory_mb, config.block_tokens, config.prefix_sharing, native)


#: Key of serving.toml and name of the Triton model → its engine.
ENGINES: Mapping[str, Callable[[Any, ServingConfig, NativeHead | None], HeadEngine]] = {
    "medusa": lambda head, config, native: MedusaEngine(head, native),
    "eagle": _eagle,
    "eagle3": _eagle,
    "redrafter": lambda head, config, native: RedrafterEngine(head, native),
}


def build_head(kind: str, config: ServingConfig) -> EngineThread[DraftRequest]:
    """Load the head of this kind and start its engine; raises ConfigError if it cannot be served."""
    # A head has so few layers that one thread is faster than several, which would fall asleep all the time.
    torch.set_num_threads(1)
    head, engine = load_engine(kind, config)
    kernels = (lambda: None) if engine.native else (lambda: compile_kernels(head, MAX_PREPARED_ROWS))
    thread = EngineThread(engine, f"{kind}-engine", kernels)
    thread.warm_up(head_warm_up(engine))
    return thread


def load_engine(kind: str, config: ServingConfig) -> tuple[Any, HeadEngine]:
    """Return the head of this kind and its engine, which drafts in native code unless the configuration says `torch`.

    Raises ConfigError if the head cannot be served.
    """
    if config.engine != "torch":
        raise ConfigError(
            f"{kind} drafts from the target's hidden states, which engine = {config.engine!r} does not give; "
            "engine = 'torch' does (key engine in the deployment file)"
        )
    check_device(config.device)
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    head = load_head(kind, getattr(config, kind), config.target, dtype, device)
    native = _native(head, kind, config) if config.kernels != "torch" else None
    engine = ENGINES[kind](head, config, native)
    if native is None:
        pack_linears(head, device, dtype)
    return head, engine


def _native(head: Any, kind: str, config: ServingConfig) -> NativeHead | None:
    """Return the head in native code; None, with the reason logged, if native code cannot compute it.

    Raises ConfigError instead if the deployment asks for native code.
    """
    level, reason = logging.INFO, unsupported_head(head)
    if reason:
        reason = f"it does not support {reason}"
    else:
        try:
            return NativeHead(head, quantize_linears(head) if config.dtype == "int8" else None)
        except Unbuilt as error:
            level, reason = logging.WARNING, str(error)
    if config.kernels == "native":
        raise native_refused(kind, reason)
    log.log(level, "%s: torch computes this head, not native code: %s", kind, reason)
    return None


def head_warm_up(engine: HeadEngine) -> list[DraftRequest]:
    """Return the calls that warm up a head: eight tokens, with dynamic and static trees, greedy and sampled."""
    context, features = Context([0] * 8), np.zeros((7, engine.feature_width), np.float32)
    return [
        DraftRequest(delta_of(context, 0, 1, "warm-up"), sampling, 4, 2, head)
        for head in (HeadInput(features, width=2), HeadInput(features, choices=tree_of_choices([[0, 0], [1]])))
        for sampling in (Sampling(), Sampling(1.0, top_p=0.9))
    ]
