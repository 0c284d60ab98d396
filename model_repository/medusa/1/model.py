"""Triton model `medusa`: hosts Medusa's heads, which propose a static tree a call."""

from __future__ import annotations

import os
from typing import Any

from orchestrator.deployment.config import load_config
from orchestrator.triton.engine_host import EngineHost
from orchestrator.wire.drafter import pack_draft_response, unpack_draft_request
from runtime.heads.build import build_head


class TritonPythonModel:
    """Triton's entry points, handed on to the host."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the head and warm it up."""
        engine = build_head("medusa", load_config(os.environ["SERVING_CONFIG"]))
        self._host = EngineHost("medusa", engine, unpack_draft_request, pack_draft_response)

    def execute(self, requests: list[Any]) -> list[None]:
        """Hand the requests to the engine."""
        return self._host.execute(requests)

    def finalize(self) -> None:
        """Stop the engine."""
        self._host.finalize()
