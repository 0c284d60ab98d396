"""Builds engine = "llm_api": a warm client of an LLM, from the folder that `python -m build.trtllm.llm_api` writes."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from orchestrator.core.deployment.capabilities import llm_capabilities
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.engine_manifest import LlmManifest, read_llm_manifest
from orchestrator.core.errors import ConfigError, first_line
from orchestrator.core.messages.target import StepRequest
from runtime.engine.build_engines import ModelCaller
from runtime.trtllm.client import TrtllmClient
from runtime.trtllm.executor.build_executor import start_target
from runtime.trtllm.llm_api.adapter import LlmAdapter
from runtime.trtllm.llm_api.transport import LlmTransport

log = logging.getLogger(__name__)


def build_target(config: ServingConfig, caller: ModelCaller) -> tuple[TrtllmClient[StepRequest], LlmManifest]:
    """Make the LLM and start its client; raises ConfigError when it cannot be served."""
    manifest = read_llm_manifest(Path(config.target))
    llmapi = _library(manifest)
    log.warning(
        "engine = 'llm_api' (method %s) is EXPERIMENTAL: it has never been run with the library", manifest.method
    )
    capabilities = llm_capabilities(manifest)
    transport = LlmTransport(_llm(llmapi, manifest, config))
    return start_target(transport, LlmAdapter(llmapi, manifest, capabilities), capabilities), manifest


def _library(manifest: LlmManifest) -> Any:
    try:
        version = importlib.import_module("tensorrt_llm").__version__
        llmapi = importlib.import_module("tensorrt_llm.llmapi")
    except ImportError as error:
        raise ConfigError(
            f"engine = 'llm_api' needs the package tensorrt_llm: run the server in the container {manifest.image} "
            f"({error})"
        ) from None
    if version != manifest.trtllm_version:
        raise ConfigError(
            f"the names in llm_api.json are those of TensorRT-LLM {manifest.trtllm_version}, this is {version} "
            f"(make the folder again with trtllm_version = {version!r}, or run {manifest.image})"
        )
    return llmapi


def _llm(llmapi: Any, manifest: LlmManifest, config: ServingConfig) -> Any:
    """Return the LLM; raises ConfigError with the library's error when it cannot be made."""
    try:
        cache = llmapi.KvCacheConfig(enable_block_reuse=config.prefix_sharing)
        speculation = {"speculative_config": _speculation(llmapi, manifest)} if manifest.speculative_config else {}
        # The server has the tokenizer: only tokens go in and come out.
        return llmapi.LLM(
            model=manifest.model, skip_tokenizer_init=True, kv_cache_config=cache, **speculation, **manifest.keywords
        )
    except Exception as error:
        raise ConfigError(f"TensorRT-LLM's LLM API cannot load {manifest.model}: {first_line(error)}") from error


def _speculation(llmapi: Any, manifest: LlmManifest) -> Any:
    """Return the decoding configuration, whose class has one of two names depending on the release."""
    fields = dict(manifest.speculative_config)
    of_type = f"{fields.pop('decoding_type').replace('_', '')}DecodingConfig"
    kind = getattr(llmapi, of_type, None) or getattr(llmapi, manifest.config_class)
    return kind(**fields)
