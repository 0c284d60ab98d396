"""Builds a deployment's engines; imports only the engine that the configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from orchestrator.core.arrays import Incoming
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import ConfigError

#: Engine → the module that builds it: `build_target(config, caller)` and `build_draft(config, caller)`.
BUILDERS = {
    "torch": "runtime.engine.torch_engine",
    "tensorrt_llm": "runtime.trtllm.executor.build_executor",
    "tensorrtllm_backend": "runtime.trtllm.backend.build_backend",
    "llm_api": "runtime.trtllm.llm_api.build_llm_api",
}


class ModelCall(Protocol):
    """Calls one Triton model and waits for its response."""

    def __call__(self, tensors: Incoming, outputs: Sequence[str], request_id: str, limit_s: float) -> Incoming:
        """Return the tensors of the response; raises ServingError, within `limit_s` or soon after it."""


class ModelCaller(Protocol):
    """Returns the function that calls a Triton model, by the model's name."""

    def __call__(self, model: str) -> ModelCall:
        """Return the function that calls `model`."""


def no_caller(model: str) -> ModelCall:
    """Raise ConfigError: Triton models cannot be called from outside Triton."""
    raise ConfigError(f"the Triton model {model!r} can only be called from within Triton (python -m launcher)")


def build_target(config: ServingConfig, caller: ModelCaller = no_caller) -> tuple[Any, Any]:
    """Load the target and start its engine.

    caller: calls the models of NVIDIA's backend, for engine = "tensorrtllm_backend".
    Returns the engine's client (`orchestrator.server.engine_host.EngineClient`), and the model or its manifest, which
    has `vocab_size`. Raises ConfigError if the target cannot be served.
    """
    return importlib.import_module(BUILDERS[config.engine]).build_target(config, caller)


def build_draft(config: ServingConfig, caller: ModelCaller = no_caller) -> tuple[Any, Any]:
    """Load the draft model and start its engine; arguments and result as for `build_target`."""
    return importlib.import_module(BUILDERS[config.engine]).build_draft(config, caller)
