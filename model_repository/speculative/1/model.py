"""Triton model `speculative`: the public door, streamed; the loop itself is `orchestrator/generation/loop.py`."""

from __future__ import annotations

import os
from typing import Any

from orchestrator.deployment.config import load_config
from orchestrator.triton.public_host import PublicHost


class TritonPythonModel:
    """Triton's entry points, handed on to the host."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the deployment and the target's tokenizer."""
        self._host = PublicHost(load_config(os.environ["SERVING_CONFIG"]), args["model_config"])

    def execute(self, requests: list[Any]) -> Any:
        """Admit the requests; each is answered from its own thread."""
        return self._host.execute(requests)

    def finalize(self) -> None:
        """Let the running requests end."""
        self._host.finalize()
