"""From a deployment's configuration to a warm engine thread."""

from __future__ import annotations

import logging

import torch

from orchestrator.core.errors import ConfigError
from orchestrator.core.types import HiddenStates
from orchestrator.deployment.config import ServingConfig
from orchestrator.deployment.engine_manifest import LlmManifest, Manifest, served_checkpoint
from orchestrator.sampling.grammar import Grammars
from orchestrator.wire.calls import DraftRequest, StepRequest
from runtime.engine.calls import Request
from runtime.engine.cpu_threads import choose_threads
from runtime.engine.draft import DraftEngine
from runtime.engine.paged import Model, PagedModel
from runtime.engine.target import TargetEngine
from runtime.engine.thread import EngineThread
from runtime.model.check import warm_up_draft, warm_up_target
from runtime.model.load import load_model
from runtime.trtllm.backend import build as trtllm_backend
from runtime.trtllm.backend.build import Caller, no_caller
from runtime.trtllm.backend.client import BackendClient
from runtime.trtllm.executor import build as trtllm
from runtime.trtllm.executor.client import ExecutorClient
from runtime.trtllm.llm_api import build as llm_api
from runtime.trtllm.trees import build as trtllm_trees

log = logging.getLogger(__name__)

#: What answers an engine's calls.
Line = EngineThread[Request] | ExecutorClient[Request] | BackendClient[Request]


def states_of(config: ServingConfig) -> HiddenStates:
    """Return which hidden states the deployment's heads read."""
    last = HiddenStates.LAST if config.medusa or config.eagle or config.redrafter else HiddenStates.NONE
    return last | (HiddenStates.LAYERS if config.eagle3 else HiddenStates.NONE)


def _load(checkpoint: str, config: ServingConfig, features: HiddenStates) -> PagedModel:
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {config.device!r}, but torch sees no CUDA device (serving.toml)")
    model = load_model(checkpoint, config.device, config.dtype, features)
    paged = PagedModel(model, config.kv_memory_mb, config.block_tokens, share=config.prefix_sharing)
    log.info("%s: %d threads", checkpoint, choose_threads(paged))
    return paged


def _grammars(config: ServingConfig, paged: PagedModel) -> Grammars:
    """Return what structured output is checked with: the target's tokenizer, masks as wide as the engine's logits."""
    checkpoint = served_checkpoint(config)
    return Grammars(checkpoint.tokenizer_file, paged.model.vocab_size, checkpoint.eos_ids)


def build_target(
    config: ServingConfig, caller: Caller = no_caller
) -> tuple[Line[StepRequest], Model | Manifest | LlmManifest]:
    """Load the target and start its engine; raises ConfigError when it cannot be served.

    caller: the way to the models of NVIDIA's backend, for the engine of that name.
    """
    if config.engine == "tensorrt_llm":
        return trtllm.build_target(config)
    if config.engine == "tensorrtllm_backend":
        return trtllm_backend.build_target(config, caller)
    if config.engine == "llm_api":
        return llm_api.build_target(config)
    is_compiled = config.engine == trtllm_trees.ENGINE
    paged = trtllm_trees.load_paged(config) if is_compiled else _load(config.target, config, states_of(config))
    engine = EngineThread(TargetEngine(paged, _grammars(config, paged)), "target-engine", paged.model.prepare)
    engine.start()
    warm_up_target(engine, paged.model.vocab_size)
    return engine, paged.model


def build_draft(config: ServingConfig, caller: Caller = no_caller) -> tuple[Line[DraftRequest], Model | Manifest]:
    """Load the draft model and start its engine; raises ConfigError when it cannot be served; caller: as above."""
    if config.engine in ("tensorrt_llm", trtllm_trees.ENGINE):
        return trtllm.build_draft(config)
    if config.engine == "tensorrtllm_backend":
        return trtllm_backend.build_draft(config, caller)
    paged = _load(config.draft, config, HiddenStates.NONE)
    engine = EngineThread(DraftEngine(paged, _grammars(config, paged)), "draft-engine", paged.model.prepare)
    engine.start()
    warm_up_draft(engine, paged.model.vocab_size)
    return engine, paged.model
