"""Calls a Triton model that answers with any number of responses, as NVIDIA's backend does when it is decoupled."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.tensors import Incoming, Tensors
from orchestrator.triton import pb

_DECOUPLED = re.compile(r"^[^#]*\bdecoupled\s*:\s*true\b", re.IGNORECASE | re.MULTILINE)


class BackendCall:
    """Calls one model of NVIDIA's backend; implements `runtime.trtllm_backend.line.Call`."""

    def __init__(self, model: str, decoupled: bool) -> None:
        self._model = model
        self._decoupled = decoupled

    def __call__(self, tensors: Incoming, outputs: Sequence[str], request_id: str, limit_s: float) -> list[Tensors]:
        """Return the tensors of each response."""
        return pb.responses(self._model, tensors, outputs, limit_s, request_id, self._decoupled)


def caller_beside(folder: str) -> Callable[[str], BackendCall]:
    """Return what makes a call of a model from its name; `folder` is our own model's, in the same repository.

    A decoupled model is called in another way, and only its configuration says which it is.
    """

    def caller(model: str) -> BackendCall:
        file = Path(folder).parent / model / "config.pbtxt"
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror} (python -m build.trtllm.repository)") from None
        return BackendCall(model, bool(_DECOUPLED.search(text)))

    return caller
