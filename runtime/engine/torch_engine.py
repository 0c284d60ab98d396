"""Builds the torch engine: a warm engine thread over a paged model."""

from __future__ import annotations

import logging

import torch

from orchestrator.core.errors import ConfigError
from orchestrator.core.types import HiddenStates
from orchestrator.deployment.config import ServingConfig
from orchestrator.deployment.engine_manifest import served_checkpoint
from orchestrator.sampling.grammar import Grammars
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from runtime.engine.build import ModelCaller
from runtime.engine.cpu_threads import choose_threads
from runtime.engine.draft import DraftEngine
from runtime.engine.paged import Model, PagedModel
from runtime.engine.target import TargetEngine
from runtime.engine.thread import EngineThread
from runtime.model.check import warm_up_draft, warm_up_target
from runtime.model.load import load_model

log = logging.getLogger(__name__)


def build_target(config: ServingConfig, caller: ModelCaller) -> tuple[EngineThread[StepRequest], Model]:
    """Load the target and start its engine; raises ConfigError when it cannot be served."""
    last = HiddenStates.LAST if config.medusa or config.eagle or config.redrafter else HiddenStates.NONE
    layers = HiddenStates.LAYERS if config.eagle3 else HiddenStates.NONE
    return start_target(_load(config.target, config, last | layers), config)


def build_draft(config: ServingConfig, caller: ModelCaller) -> tuple[EngineThread[DraftRequest], Model]:
    """Load the draft model and start its engine; raises ConfigError when it cannot be served."""
    paged = _load(config.draft, config, HiddenStates.NONE)
    engine = EngineThread(DraftEngine(paged, _grammars(config, paged)), "draft-engine", paged.model.prepare)
    engine.start()
    warm_up_draft(engine, paged.model.vocab_size)
    return engine, paged.model


def start_target(paged: PagedModel, config: ServingConfig) -> tuple[EngineThread[StepRequest], Model]:
    """Start a target engine over a loaded model, and warm it up."""
    engine = EngineThread(TargetEngine(paged, _grammars(config, paged)), "target-engine", paged.model.prepare)
    engine.start()
    warm_up_target(engine, paged.model.vocab_size)
    return engine, paged.model


def _load(checkpoint: str, config: ServingConfig, features: HiddenStates) -> PagedModel:
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {config.device!r}, but torch sees no CUDA device (serving.toml)")
    model = load_model(checkpoint, config.device, config.dtype, features)
    paged = PagedModel(model, config.kv_memory_mb, config.block_tokens, share=config.prefix_sharing)
    log.info("%s: %d threads", checkpoint, choose_threads(paged))
    return paged


def _grammars(config: ServingConfig, paged: PagedModel) -> Grammars:
    """Return the grammar compiler: the target's tokenizer, and masks as wide as the engine's logits."""
    checkpoint = served_checkpoint(config)
    return Grammars(checkpoint.tokenizer_file, paged.model.vocab_size, checkpoint.eos_ids)
