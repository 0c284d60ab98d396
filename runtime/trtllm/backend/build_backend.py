"""Builds engine = "tensorrtllm_backend": a client of NVIDIA's backend, which loads the engines itself."""

from __future__ import annotations

import logging
from pathlib import Path

from orchestrator.core.deployment.capabilities import eagle_posterior
from orchestrator.core.deployment.config import BACKEND_MODELS, ServingConfig
from orchestrator.core.deployment.engine_manifest import (
    EXTERNAL,
    Manifest,
    check_engine,
    check_role,
    lookahead_sizes,
    read_manifest,
)
from orchestrator.core.errors import ConfigError
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from runtime.engine.build_engines import ModelCaller
from runtime.engine.calls import Request
from runtime.trtllm.adapter import Adapter
from runtime.trtllm.backend.adapters import DraftAdapter, EngineSideAdapter, StepAdapter
from runtime.trtllm.backend.tensors import Backend
from runtime.trtllm.backend.transport import BackendTransport
from runtime.trtllm.client import TrtllmClient

log = logging.getLogger(__name__)


def build_target(config: ServingConfig, caller: ModelCaller) -> tuple[TrtllmClient[StepRequest], Manifest]:
    """Start the client of the target's Triton model; raises ConfigError when the engine cannot be served."""
    manifest = _checked(config, "target")
    backend, shares, method = _backend(manifest), _shares_blocks(manifest), manifest.engine_method
    if method == "eagle2" or eagle_posterior(manifest):
        raise ConfigError(
            "NVIDIA's backend has no parameter for EAGLE's dynamic tree, nor for sampling with EAGLE "
            "(use engine = 'tensorrt_llm')"
        )
    adapter: Adapter[StepRequest] = StepAdapter(backend, shares)
    if method:
        sizes = lookahead_sizes(manifest) if method == "lookahead" else ()
        adapter = EngineSideAdapter(backend, shares, method, manifest.max_draft_len, sizes)
    return _start("target", adapter, config, caller), manifest


def build_draft(config: ServingConfig, caller: ModelCaller) -> tuple[TrtllmClient[DraftRequest], Manifest]:
    """Start the client of the draft model's Triton model; raises ConfigError when the engine cannot be served."""
    manifest = _checked(config, "draft")
    return _start("draft", DraftAdapter(_backend(manifest), _shares_blocks(manifest)), config, caller), manifest


def _checked(config: ServingConfig, role: str) -> Manifest:
    """Return an engine's checked manifest; whether its version can be loaded is for the backend to check."""
    folder = Path(getattr(config, role))
    draft = Path(config.draft) if role == "target" and config.draft else None
    manifest = check_engine(folder, version=read_manifest(folder).trtllm_version, draft=draft)
    check_role(folder, manifest, role)
    if not config.prefix_sharing and _shares_blocks(manifest):
        raise ConfigError(
            f"prefix_sharing must be true for the {role}, got false: NVIDIA's backend shares KV blocks by its own "
            "parameter enable_kv_cache_reuse, which is set for this engine (key prefix_sharing)"
        )
    return manifest


def _start(role: str, adapter: Adapter[Request], config: ServingConfig, caller: ModelCaller) -> TrtllmClient[Request]:
    model = BACKEND_MODELS[role]
    log.warning("%s is served by NVIDIA's backend (Triton model %s): experimental, never run on an engine", role, model)
    transport = BackendTransport(caller(model), config.max_running, role)
    client = TrtllmClient(transport, adapter, f"{role}-engine")
    client.start()
    return client


def _backend(manifest: Manifest) -> Backend:
    is_old = manifest.trtllm_version.startswith("0.")
    return Backend(
        manifest.vocab_size,
        manifest.max_seq_len,
        manifest.max_draft_len if manifest.mode == EXTERNAL else 0,
        seed_input="random_seed" if is_old else "seed",
    )


def _shares_blocks(manifest: Manifest) -> bool:
    """Return whether the backend reuses KV blocks, which it does unless its configuration says otherwise."""
    parameters: dict[str, str] = manifest.plan.get("servers", {}).get(manifest.role, {})
    return parameters.get("enable_kv_cache_reuse", "true") == "true"
