"""From a deployment's configuration to a warm engine thread."""

from __future__ import annotations

import torch

from orchestrator.config import ServingConfig
from orchestrator.wire import DraftRequest, StepRequest
from runtime.check import warm_up_draft, warm_up_target
from runtime.draft import DraftEngine
from runtime.load import load_model
from runtime.model import CausalModel
from runtime.paged import PagedModel
from runtime.target import TargetEngine
from runtime.thread import EngineThread


def feature_kind(config: ServingConfig) -> str:
    """Return which hidden states the deployment's heads need."""
    if config.eagle3:
        return "eagle3"
    return "last" if config.medusa or config.eagle or config.redrafter else "none"


def _paged(model: CausalModel, config: ServingConfig) -> PagedModel:
    return PagedModel(model, config.kv_memory_mb, config.block_tokens)


@torch.inference_mode()
def build_target(config: ServingConfig) -> tuple[EngineThread[StepRequest], CausalModel]:
    """Load the target and start its engine; raises ConfigError when it cannot be served."""
    model = load_model(config.target, config.device, config.dtype, feature_kind(config))
    engine = EngineThread(TargetEngine(_paged(model, config)), "target-engine")
    engine.start()
    warm_up_target(engine, model.vocab_size)
    return engine, model


@torch.inference_mode()
def build_draft(config: ServingConfig) -> tuple[EngineThread[DraftRequest], CausalModel]:
    """Load the draft model and start its engine; raises ConfigError when it cannot be served."""
    model = load_model(config.draft, config.device, config.dtype)
    engine = EngineThread(DraftEngine(_paged(model, config)), "draft-engine")
    engine.start()
    warm_up_draft(engine, model.vocab_size)
    return engine, model
