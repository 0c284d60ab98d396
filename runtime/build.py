"""From a deployment's configuration to a warm engine thread."""

from __future__ import annotations

import logging

import torch

from orchestrator.checkpoint import read_checkpoint
from orchestrator.config import ServingConfig
from orchestrator.engine_manifest import Manifest
from orchestrator.errors import ConfigError
from orchestrator.grammar import Grammars
from orchestrator.types import States
from orchestrator.wire import DraftRequest, StepRequest
from runtime.check import warm_up_draft, warm_up_target
from runtime.draft import DraftEngine
from runtime.load import load_model
from runtime.model import CausalModel
from runtime.paged import PagedModel
from runtime.target import TargetEngine
from runtime.thread import EngineThread
from runtime.threads import choose_threads
from runtime.trtllm import build as trtllm
from runtime.trtllm.line import ExecutorLine

log = logging.getLogger(__name__)


def states_of(config: ServingConfig) -> States:
    """Return which hidden states the deployment's heads read."""
    last = States.LAST if config.medusa or config.eagle or config.redrafter else States.NONE
    return last | (States.LAYERS if config.eagle3 else States.NONE)


def _load(checkpoint: str, config: ServingConfig, features: States) -> PagedModel:
    if config.engine != "torch":
        raise ConfigError(
            f"engine = {config.engine!r} is not part of this version; allowed: 'torch', 'tensorrt_llm' (serving.toml)"
        )
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {config.device!r}, but torch sees no CUDA device (serving.toml)")
    model = load_model(checkpoint, config.device, config.dtype, features)
    paged = PagedModel(model, config.kv_memory_mb, config.block_tokens, share=config.prefix_sharing)
    log.info("%s: %d threads", checkpoint, choose_threads(paged))
    return paged


def _grammars(config: ServingConfig, paged: PagedModel) -> Grammars:
    """Return what structured output is checked with: the target's tokenizer, masks as wide as the engine's logits."""
    checkpoint = read_checkpoint(config.target)
    return Grammars(checkpoint.tokenizer_file, paged.model.vocab_size, checkpoint.eos_ids)


def build_target(
    config: ServingConfig,
) -> tuple[EngineThread[StepRequest] | ExecutorLine[StepRequest], CausalModel | Manifest]:
    """Load the target and start its engine; raises ConfigError when it cannot be served."""
    if config.engine == "tensorrt_llm":
        return trtllm.build_target(config)
    paged = _load(config.target, config, states_of(config))
    engine = EngineThread(TargetEngine(paged, _grammars(config, paged)), "target-engine", paged.model.prepare)
    engine.start()
    warm_up_target(engine, paged.model.vocab_size)
    return engine, paged.model


def build_draft(
    config: ServingConfig,
) -> tuple[EngineThread[DraftRequest] | ExecutorLine[DraftRequest], CausalModel | Manifest]:
    """Load the draft model and start its engine; raises ConfigError when it cannot be served."""
    if config.engine == "tensorrt_llm":
        return trtllm.build_draft(config)
    paged = _load(config.draft, config, States.NONE)
    engine = EngineThread(DraftEngine(paged, _grammars(config, paged)), "draft-engine", paged.model.prepare)
    engine.start()
    warm_up_draft(engine, paged.model.vocab_size)
    return engine, paged.model
