"""Builds engine = "tensorrt_llm": a warm client of a compiled engine, from the folder that build.trtllm writes."""

from __future__ import annotations

import logging
from pathlib import Path

from orchestrator.core.context import Context
from orchestrator.core.deployment.capabilities import Capabilities, executor_capabilities
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.engine_manifest import Manifest, check_engine, check_role, read_manifest
from orchestrator.core.errors import ConfigError, ServingError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import EngineSpeculation, StepOptions
from runtime.engine.build_engines import ModelCaller, no_caller
from runtime.engine.calls import Request, submit_and_wait
from runtime.trtllm.adapter import Adapter
from runtime.trtllm.client import TrtllmClient
from runtime.trtllm.executor.adapters import DraftAdapter, StepAdapter
from runtime.trtllm.executor.engine_side import EngineSideAdapter
from runtime.trtllm.executor.library import Library, load_library, open_executor
from runtime.trtllm.executor.transport import ExecutorTransport
from runtime.trtllm.transport import Transport

log = logging.getLogger(__name__)

_WARM_UP_DELTA = delta_of(Context([1, 2, 3, 4]), 0, 1, "warm-up")


def build_target(config: ServingConfig, caller: ModelCaller = no_caller) -> tuple[TrtllmClient[StepRequest], Manifest]:
    """Load the target's engine and start its client; raises ConfigError when it cannot be served."""
    folder = Path(config.target)
    library, manifest = _checked(folder, "target", Path(config.draft) if config.draft else None)
    if config.max_running > manifest.max_batch_size:
        log.warning(
            "max_running %d is above the engine's max_batch_size %d: the requests beyond it wait inside the executor",
            config.max_running,
            manifest.max_batch_size,
        )
    transport = ExecutorTransport(open_executor(library, folder, manifest, config.prefix_sharing))
    capabilities = executor_capabilities(manifest)
    adapter = EngineSideAdapter if capabilities.engine_method else StepAdapter
    return start_target(transport, adapter(library.api, manifest, capabilities), capabilities), manifest


def build_draft(config: ServingConfig, caller: ModelCaller = no_caller) -> tuple[TrtllmClient[DraftRequest], Manifest]:
    """Load the draft model's engine and start its client; raises ConfigError when it cannot be served."""
    folder = Path(config.draft)
    library, manifest = _checked(folder, "draft")
    transport = ExecutorTransport(open_executor(library, folder, manifest, config.prefix_sharing))
    client = TrtllmClient(transport, DraftAdapter(library.api, manifest), "draft-engine")
    client.start()
    _warm_up(client, DraftRequest(_WARM_UP_DELTA, Sampling(), 2, 2))
    return client, manifest


def start_target(
    transport: Transport, adapter: Adapter[StepRequest], capabilities: Capabilities
) -> TrtllmClient[StepRequest]:
    """Start a target's client; warm it up with a step without drafts and, if the engine has drafts, one with drafts.

    Raises ConfigError when the engine does not answer them.
    """
    client = TrtllmClient(transport, adapter, "target-engine")
    client.start()
    for num_drafts in sorted({0, min(capabilities.max_nodes, 2)}):
        options = StepOptions(engine_speculation=EngineSpeculation(8) if capabilities.engine_method else None)
        rule, temperature = capabilities.default_rule, capabilities.served_temperature
        sampling = Sampling(temperature, epsilon=capabilities.epsilon, rule=rule)
        tree = TokenTree.chain([5] * num_drafts)
        _warm_up(client, StepRequest(_WARM_UP_DELTA, tree, sampling, options, 1000))
    return client


def _checked(folder: Path, role: str, draft: Path | None = None) -> tuple[Library, Manifest]:
    """Return the library and the manifest of an engine that it can load."""
    library = load_library(read_manifest(folder).image)
    manifest = check_engine(folder, version=library.version, draft=draft)
    check_role(folder, manifest, role)
    return library, manifest


def _warm_up(client: TrtllmClient[Request], request: Request) -> None:
    try:
        submit_and_wait(client.submit, request)
    except ServingError as error:
        client.close()
        raise ConfigError(f"the engine did not answer the warm-up request: {error}") from None
    client.release(request.delta.sequence_id)
