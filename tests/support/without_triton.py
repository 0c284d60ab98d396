"""Imports modules of `orchestrator.server` without Triton, and removes them again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

PB_UTILS = "triton_python_backend_utils"
FOLDER = "orchestrator.server."


class NoMetrics:
    """A stand-in for the metrics of a public model in tests of something else."""

    def ended(self, *given: object) -> None:
        """Count nothing."""

    def refused(self, reason: str) -> None:
        """Count nothing."""


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """Yield the module of this name; its `pb` cannot send anything."""
    before = set(sys.modules)
    sys.modules.setdefault(PB_UTILS, SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1))  # type: ignore[arg-type]
    try:
        yield importlib.import_module(FOLDER + name)
    finally:
        # Other modules stay, because one that is imported twice may not work.
        for new in set(sys.modules) - before:
            if new == PB_UTILS or new.startswith(FOLDER):
                del sys.modules[new]
