"""The fingerprint that ties heads to their target: which changes of a target's files it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.models.heads.checkpoint.target_tables import fingerprint

NUM_BYTES = 1_000_000


def write(folder: Path, **tensors: torch.Tensor) -> str:
    """Write a target that is nothing but these tensors and return its fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return fingerprint(str(folder))


def weights() -> torch.Tensor:
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(256, (NUM_BYTES,), generator=numbers, dtype=torch.uint8)


@pytest.mark.parametrize(
    "changed",
    [slice(0, 1), slice(NUM_BYTES * 7 // 15, NUM_BYTES * 8 // 15), slice(NUM_BYTES - 1, None), slice(4096, None)],
    ids=["first byte", "middle", "last byte", "all but the first page"],
)
def test_change_anywhere_in_a_tensor_shows(tmp_path: Path, changed: slice) -> None:
    one = weights()
    other = one.clone()
    other[changed] ^= 1
    assert write(tmp_path / "one", w=one) != write(tmp_path / "other", w=other)


def test_how_the_tensors_are_spread_over_files_does_not_count(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", a=weights(), b=torch.ones(3))
    write(tmp_path / "parts", a=weights())
    save_file({"b": torch.ones(3)}, tmp_path / "parts" / "rest.safetensors")
    assert fingerprint(str(tmp_path / "parts")) == whole
