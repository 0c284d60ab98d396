"""`make setup` installs torch again when another build of it is named, and only then."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CPU = "2.13.0 https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("stamp", "chosen", "is_replaced"),
    [
        (CPU, {}, False),
        (CPU, {"TORCH_INDEX": ""}, True),
        ("2.13.0", {"TORCH_INDEX": ""}, False),
        ("2.13.0", {}, False),
        (CPU, {"TORCH": "2.12.0"}, True),
    ],
)
def test_named_build_of_torch_replaces_another(
    tmp_path: Path, stamp: str, chosen: dict[str, str], is_replaced: bool
) -> None:
    (tmp_path / ".torch").write_text(f"{stamp}\n")
    (tmp_path / ".serve").touch()
    environ = {name: value for name, value in os.environ.items() if name not in ("TORCH", "TORCH_INDEX")}
    command = ["make", "-n", "setup", f"VENV={tmp_path}"]
    said = subprocess.run(command, cwd=ROOT, env=environ | chosen, capture_output=True, text=True, check=True).stdout
    assert ("uninstall --yes torch" in said) == ("pip" in said) == is_replaced
