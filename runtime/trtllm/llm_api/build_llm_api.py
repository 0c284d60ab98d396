"""Builds engine = "llm_api": a client of `trtllm-serve --grpc`, from the folder that `build.trtllm.llm_api` writes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from orchestrator.core.deployment.capabilities import llm_capabilities
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.engine_manifest import LlmManifest, read_llm_manifest
from orchestrator.core.errors import ConfigError, Unavailable
from orchestrator.core.messages.target import StepRequest
from runtime.engine.build_engines import ModelCaller
from runtime.trtllm.client import TrtllmClient

log = logging.getLogger(__name__)

#: How long to wait for trtllm-serve, which loads its model meanwhile.
START_LIMIT_S = 1800.0


def build_target(config: ServingConfig, caller: ModelCaller) -> tuple[TrtllmClient[StepRequest], LlmManifest]:
    """Wait for the server and start its client; raises ConfigError when it is another than the folder says."""
    manifest = read_llm_manifest(Path(config.target))
    if manifest.block_reuse and not config.prefix_sharing:
        raise ConfigError(
            "prefix_sharing must be true, got false: the LLM API was started with block reuse (key prefix_sharing; "
            "block_reuse = false in the engines' file turns it off)"
        )
    try:
        from runtime.trtllm.llm_api.adapter import LlmAdapter
        from runtime.trtllm.llm_api.transport import LlmTransport
    except ImportError as error:
        raise ConfigError(f"engine = 'llm_api' needs the extra llmapi: pip install '.[llmapi]' ({error})") from None
    log.warning("the LLM API (method %s) is EXPERIMENTAL: it has never been run with the library", manifest.method)
    transport = LlmTransport(config.llm_api_address)
    try:
        _check(manifest, *transport.await_server(START_LIMIT_S))
    except (ConfigError, Unavailable) as error:
        transport.shut_down()
        raise ConfigError(f"{error} (key llm_api_address)") from None
    client = TrtllmClient(transport, LlmAdapter(manifest, llm_capabilities(manifest)), "target-engine")
    client.start()
    return client, manifest


def _check(manifest: LlmManifest, server: Any, model: Any) -> None:
    """Raise ConfigError where the server contradicts the folder; a number that it does not tell is 0."""
    expected = {
        "version": (manifest.trtllm_version, server.version),
        "tensor_parallel_size": (manifest.tensor_parallel, server.tensor_parallel_size),
        "max_seq_len": (manifest.engine_seq_len, model.max_seq_len),
    }
    for name, (ours, theirs) in expected.items():
        if theirs and ours != theirs:
            raise ConfigError(
                f"trtllm-serve says {name} {theirs}, llm_api.json {ours}: start it with the command that python -m "
                "build.trtllm.llm_api prints, or make the folder again"
            )
