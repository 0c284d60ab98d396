"""Builds engine = "tensorrt_llm_trees_experimental": our target engine over the library's Session."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import torch

from orchestrator.core.errors import ConfigError, first_line
from orchestrator.deployment.config import ServingConfig
from orchestrator.deployment.engine_manifest import Manifest, check_engine, read_manifest
from orchestrator.wire.target import StepRequest
from runtime.engine.build import ModelCaller
from runtime.engine.paged import Model, PagedModel
from runtime.engine.thread import EngineThread
from runtime.engine.torch_engine import start_target
from runtime.trtllm.executor.build import build_draft
from runtime.trtllm.executor.library import load_library
from runtime.trtllm.trees.geometry import Geometry, read_geometry
from runtime.trtllm.trees.model import SessionModel

log = logging.getLogger(__name__)

__all__ = ["build_draft", "build_target"]

ENGINE = "tensorrt_llm_trees_experimental"


def build_target(config: ServingConfig, caller: ModelCaller) -> tuple[EngineThread[StepRequest], Model]:
    """Load the target's engine and start it; raises ConfigError when it cannot be served."""
    return start_target(load_paged(config), config)


def load_paged(config: ServingConfig) -> PagedModel:
    """Load the target's engine behind KV blocks of our own; raises ConfigError when it cannot be served."""
    folder = Path(config.target)
    manifest = read_manifest(folder)
    version = load_library(manifest.image).version
    manifest = check_engine(folder, version=version, draft=Path(config.draft) if config.draft else None)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {config.device!r}, but torch sees no CUDA device (serving.toml)")
    if manifest.num_ranks > 1:
        raise ConfigError(f"the engine {folder} is for {manifest.num_ranks} GPUs, engine = {ENGINE!r} needs 1")
    geometry = read_geometry(folder, manifest)
    log.warning("engine = %r is EXPERIMENTAL: it has never been run on a compiled engine", ENGINE)
    model = _open(folder, geometry, manifest, torch.device(config.device))
    size = geometry.tokens_per_block
    return PagedModel(model, config.kv_memory_mb, size, geometry.max_num_tokens, config.prefix_sharing)


def _open(folder: Path, geometry: Geometry, manifest: Manifest, device: torch.device) -> SessionModel:
    library = importlib.import_module("tensorrt_llm.runtime")
    if device.index is not None:
        torch.cuda.set_device(device)  # TensorRT loads an engine on the thread's own
    try:
        session = library.Session.from_serialized_engine((folder / "rank0.engine").read_bytes())
    except Exception as error:
        raise ConfigError(f"TensorRT cannot load the engine {folder}: {first_line(error)}") from error
    return SessionModel(library, session, geometry, manifest.max_seq_len, device)
