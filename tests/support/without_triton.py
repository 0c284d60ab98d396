"""The modules of `orchestrator.triton` where there is no Triton: imported for a while, and forgotten again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

PB_UTILS = "triton_python_backend_utils"
FOLDER = "orchestrator.triton."


class NoMetrics:
    """Stands for the metrics of a public model in tests of something else."""

    def ended(self, *given: object) -> None:
        """Count nothing."""

    def refused(self, reason: str) -> None:
        """Count nothing."""


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """Yield the module of this name, its `pb` without anything to send with."""
    stub: dict[str, object] = {PB_UTILS: SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1)}
    before = set(sys.modules)
    with patch.dict(sys.modules, stub):  # type: ignore[arg-type]
        yield importlib.import_module(FOLDER + name)
    for other in {known for known in sys.modules if known.startswith(FOLDER)} - before:
        del sys.modules[other]
