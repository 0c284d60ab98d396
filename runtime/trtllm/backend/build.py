"""From a deployment with engine = "tensorrtllm_backend" to a line; NVIDIA's backend itself loads the engines."""

from __future__ import annotations

import logging
from pathlib import Path

from orchestrator.deployment.capabilities import INSIDE
from orchestrator.deployment.config import BACKEND_MODELS, ServingConfig
from orchestrator.deployment.engine_manifest import (
    EXTERNAL,
    Manifest,
    check_engine,
    check_role,
    lookahead_sizes,
    read_manifest,
)
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from runtime.engine.build import ModelCaller
from runtime.engine.calls import Request
from runtime.trtllm.backend.adapters import DraftAdapter, EngineSideAdapter, StepAdapter
from runtime.trtllm.backend.client import Adapter, BackendClient
from runtime.trtllm.backend.tensors import Backend

log = logging.getLogger(__name__)


def build_target(config: ServingConfig, caller: ModelCaller) -> tuple[BackendClient[StepRequest], Manifest]:
    """Return the line to the target's Triton model; raises ConfigError when the engine cannot be served."""
    folder = Path(config.target)
    manifest = _checked(folder, "target", Path(config.draft) if config.draft else None)
    return _line("target", _target_desk(manifest), config, caller), manifest


def _target_desk(manifest: Manifest) -> Adapter[StepRequest]:
    backend, shares, method = _backend(manifest), _shares_blocks(manifest), INSIDE.get(manifest.mode)
    if not method:
        return StepAdapter(backend, shares)
    return EngineSideAdapter(backend, shares, method, lookahead_sizes(manifest) if method == "lookahead" else ())


def build_draft(config: ServingConfig, caller: ModelCaller) -> tuple[BackendClient[DraftRequest], Manifest]:
    """Return the line to the draft model's Triton model; raises ConfigError when the engine cannot be served."""
    manifest = _checked(Path(config.draft), "draft")
    return _line("draft", DraftAdapter(_backend(manifest), _shares_blocks(manifest)), config, caller), manifest


def _checked(folder: Path, role: str, draft: Path | None = None) -> Manifest:
    """Return an engine's manifest; its version is the backend's to check, which alone knows its own."""
    manifest = check_engine(folder, version=read_manifest(folder).trtllm_version, draft=draft)
    check_role(folder, manifest, role)
    return manifest


def _line(role: str, desk: Adapter[Request], config: ServingConfig, caller: ModelCaller) -> BackendClient[Request]:
    model = BACKEND_MODELS[role]
    log.warning("%s is served by NVIDIA's backend (Triton model %s): experimental, never run on an engine", role, model)
    line = BackendClient(desk, caller(model), config.max_running, role)
    line.start()
    return line


def _backend(manifest: Manifest) -> Backend:
    """Return what the adapter must know; no end id, so that the loop alone ends a text."""
    is_old = manifest.trtllm_version.startswith("0.")
    return Backend(
        manifest.vocab_size,
        manifest.max_seq_len,
        manifest.max_draft_len if manifest.mode == EXTERNAL else 0,
        seed_input="random_seed" if is_old else "seed",
    )


def _shares_blocks(manifest: Manifest) -> bool:
    """Tell whether the backend reuses KV blocks, as it does unless its configuration says otherwise."""
    parameters: dict[str, str] = manifest.plan.get("servers", {}).get(manifest.role, {})
    return parameters.get("enable_kv_cache_reuse", "true") == "true"
