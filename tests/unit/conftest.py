"""One thread for the tiny models of the unit tests: more only get in each other's way."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def without_collector() -> Iterator[None]:
    """The collector would look through a hundred thousand samplings again and again; none of them is in a cycle."""
    gc.disable()
    yield
    gc.enable()
