"""Triton model `draft`: hosts the draft language model, which proposes a chain a call."""

from __future__ import annotations

import os
from typing import Any

from orchestrator.deployment.config import load_config
from orchestrator.triton.clients import caller_beside
from orchestrator.triton.engine_host import EngineHost
from orchestrator.wire.drafter import pack_draft_response, unpack_draft_request
from runtime.engine.build import build_draft


class TritonPythonModel:
    """Triton's entry points, handed on to the host."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the draft model and warm it up."""
        engine, _ = build_draft(load_config(os.environ["SERVING_CONFIG"]), caller_beside(args["model_repository"]))
        self._host = EngineHost("draft", engine, unpack_draft_request, pack_draft_response)

    def execute(self, requests: list[Any]) -> list[None]:
        """Hand the requests to the engine."""
        return self._host.execute(requests)

    def finalize(self) -> None:
        """Stop the engine."""
        self._host.finalize()
