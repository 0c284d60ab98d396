"""Stand-ins for libraries that this machine cannot have; tests alone put this folder on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@contextmanager
def importable() -> Iterator[None]:
    """Put the stand-in for tensorrt_llm where the package would be, and take it away again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
