"""From a deployment's configuration to a warm engine thread."""

from __future__ import annotations

import logging

import torch

from orchestrator.config import ServingConfig
from orchestrator.engine_manifest import Manifest, served_checkpoint
from orchestrator.errors import ConfigError
from orchestrator.grammar import Grammars
from orchestrator.llm_manifest import LlmManifest
from orchestrator.types import States
from orchestrator.wire import DraftRequest, StepRequest
from runtime.check import warm_up_draft, warm_up_target
from runtime.draft import DraftEngine
from runtime.job import Request
from runtime.llm_api import build as llm_api
from runtime.load import load_model
from runtime.paged import Model, PagedModel
from runtime.target import TargetEngine
from runtime.thread import EngineThread
from runtime.threads import choose_threads
from runtime.trtllm import build as trtllm
from runtime.trtllm.line import ExecutorLine
from runtime.trtllm_backend import build as trtllm_backend
from runtime.trtllm_backend.build import Caller, no_caller
from runtime.trtllm_backend.line import BackendLine
from runtime.trtllm_trees import build as trtllm_trees

log = logging.getLogger(__name__)

#: What answers an engine's calls.
Line = EngineThread[Request] | ExecutorLine[Request] | BackendLine[Request]


def states_of(config: ServingConfig) -> States:
    """Return which hidden states the deployment's heads read."""
    last = States.LAST if config.medusa or config.eagle or config.redrafter else States.NONE
    return last | (States.LAYERS if config.eagle3 else States.NONE)


def _load(checkpoint: str, config: ServingConfig, features: States) -> PagedModel:
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
    paged = _load(config.draft, config, States.NONE)
    engine = EngineThread(DraftEngine(paged, _grammars(config, paged)), "draft-engine", paged.model.prepare)
    engine.start()
    warm_up_draft(engine, paged.model.vocab_size)
    return engine, paged.model
