"""From a deployment with engine = "tensorrt_llm" to a warm line; the folders are those that the builder leaves."""

from __future__ import annotations

import logging
from pathlib import Path

from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError, ServingError
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import EngineSpeculation, StepOptions
from orchestrator.deployment.capabilities import Capabilities, executor_capabilities
from orchestrator.deployment.config import ServingConfig
from orchestrator.deployment.engine_manifest import Manifest, check_engine, check_role, read_manifest
from orchestrator.wire.context import delta_of
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from runtime.engine.build import ModelCaller, no_caller
from runtime.engine.calls import Request, submit_and_wait
from runtime.trtllm.executor.client import ExecutorClient
from runtime.trtllm.executor.drafts import DraftAdapter
from runtime.trtllm.executor.engine_side import EngineSideAdapter
from runtime.trtllm.executor.library import Library, load_library, open_executor
from runtime.trtllm.executor.steps import StepAdapter

log = logging.getLogger(__name__)

_WARM_UP = Context([1, 2, 3, 4])


def build_target(
    config: ServingConfig, caller: ModelCaller = no_caller
) -> tuple[ExecutorClient[StepRequest], Manifest]:
    """Load the target's engine and start its line; raises ConfigError when it cannot be served."""
    folder = Path(config.target)
    draft = Path(config.draft) if config.draft else None
    library, manifest = _checked(folder, "target", draft)
    if config.max_running > manifest.max_batch_size:
        log.warning(
            "max_running %d is above the engine's max_batch_size %d: the requests beyond it wait inside the executor",
            config.max_running,
            manifest.max_batch_size,
        )
    executor = open_executor(library, folder, manifest, config.prefix_sharing)
    capabilities = executor_capabilities(manifest)
    desk = EngineSideAdapter if capabilities.engine_method else StepAdapter
    line = ExecutorClient(executor, desk(library, manifest, capabilities), "target-engine")
    line.start()
    warm_up_line(line, capabilities)
    return line, manifest


def warm_up_line(line: ExecutorClient[StepRequest], capabilities: Capabilities) -> None:
    """Run a step without drafts, and one with what drafts the engine takes or makes; ConfigError when it cannot."""
    for num_drafts in sorted({0, min(capabilities.max_nodes, 2)}):
        options = StepOptions(engine_speculation=EngineSpeculation(8) if capabilities.engine_method else None)
        tree, sampling = TokenTree.chain([5] * num_drafts), Sampling(rule=Rule.ENGINE)
        _warm_up(line, StepRequest(delta_of(_WARM_UP, 0, 1, "warm-up"), tree, sampling, options, 1000))


def build_draft(
    config: ServingConfig, caller: ModelCaller = no_caller
) -> tuple[ExecutorClient[DraftRequest], Manifest]:
    """Load the draft model's engine and start its line; raises ConfigError when it cannot be served."""
    folder = Path(config.draft)
    library, manifest = _checked(folder, "draft")
    executor = open_executor(library, folder, manifest, config.prefix_sharing)
    line = ExecutorClient(executor, DraftAdapter(library, manifest), "draft-engine")
    line.start()
    _warm_up(line, DraftRequest(delta_of(_WARM_UP, 0, 1, "warm-up"), Sampling(), 2, 2))
    return line, manifest


def _checked(folder: Path, role: str, draft: Path | None = None) -> tuple[Library, Manifest]:
    """Return the library and the manifest of an engine that it can load."""
    library = load_library(read_manifest(folder).image)
    manifest = check_engine(folder, version=library.version, draft=draft)
    check_role(folder, manifest, role)
    return library, manifest


def _warm_up(line: ExecutorClient[Request], request: Request) -> None:
    try:
        submit_and_wait(line.submit, request)
    except ServingError as error:
        line.close()
        raise ConfigError(f"the engine answers nothing: {error}") from None
    line.release(request.delta.sequence_id)
