"""Triton model `target`: hosts the target engine, which answers steps from its own thread."""

from __future__ import annotations

import functools
import os
from typing import Any

from orchestrator.deployment.config import load_config
from orchestrator.triton.clients import caller_beside
from orchestrator.triton.engine_host import EngineHost
from orchestrator.wire.target import pack_acceptance, unpack_step
from runtime.engine.build import build_target


class TritonPythonModel:
    """Triton's entry points, handed on to the host."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the target and warm it up."""
        config = load_config(os.environ["SERVING_CONFIG"])
        engine, model = build_target(config, caller_beside(args["model_repository"]))
        unpack = functools.partial(unpack_step, vocab_size=model.vocab_size, max_nodes=config.max_nodes)
        self._host = EngineHost("target", engine, unpack, pack_acceptance)

    def execute(self, requests: list[Any]) -> list[None]:
        """Hand the requests to the engine."""
        return self._host.execute(requests)

    def finalize(self) -> None:
        """Stop the engine."""
        self._host.finalize()
