"""Random passes, sound and damaged, under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from runtime.native.library import LIBRARY

DRIVER = Path(__file__).with_name("fuzz.cpp")
FLAGS = ["-std=c++17", "-O1", "-g", "-march=native", "-ffp-contract=off", "-pthread", "-fno-sanitize-recover=all"]
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler with sanitizers")
@pytest.mark.parametrize(("sanitizers", "rounds"), [("address,undefined", 150), ("thread", 40)])
@pytest.mark.timeout(300)
def test_no_pass_reads_or_writes_outside_its_arrays(tmp_path: Path, sanitizers: str, rounds: int) -> None:
    program = tmp_path / "fuzz"
    sources = [str(LIBRARY.folder / name) for name in LIBRARY.sources]
    command = [
        str(COMPILER),
        *FLAGS,
        f"-fsanitize={sanitizers}",
        f"-I{LIBRARY.folder}",
        str(DRIVER),
        *sources,
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True, timeout=200)
    done = subprocess.run([program, str(rounds)], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "damaged passes refused" in done.stdout
