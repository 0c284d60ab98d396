"""Random passes, sound and damaged: under sanitizers, and compiled for several processors."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from runtime.native.library import LIBRARY

DRIVER = Path(__file__).with_name("fuzz.cpp")
FLAGS = ["-std=c++17", "-Og", "-g", "-ffp-contract=off", "-pthread"]
COMPILER = shutil.which("g++") or shutil.which("clang++")


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler with sanitizers")


def compiled(folder: Path, *flags: str) -> Path:
    """Compile the driver with the library's sources, as one file: it takes a third of the time."""
    program, together = folder / "fuzz", folder / "together.cpp"
    sources = [DRIVER, *(LIBRARY.folder / name for name in LIBRARY.sources)]
    together.write_text("".join(f'#include "{source}"\n' for source in sources))
    command = [str(COMPILER), *FLAGS, *flags, f"-I{LIBRARY.folder}", str(together), "-o", str(program)]
    subprocess.run(command, check=True, timeout=250)
    return program


def run(program: Path, rounds: int) -> str:
    done = subprocess.run([program, str(rounds)], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_compiler
@pytest.mark.parametrize(
    ("sanitizers", "processor", "rounds"), [("address,undefined", "native", 150), ("thread", "x86-64-v3", 40)]
)
@pytest.mark.timeout(500)
def test_no_pass_reads_or_writes_outside_its_arrays(
    tmp_path: Path, sanitizers: str, processor: str, rounds: int
) -> None:
    """The second processor has no products of bfloat16, which are then computed by other instructions."""
    if platform.machine() != "x86_64":
        processor = "native"
    program = compiled(tmp_path, f"-march={processor}", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    assert "damaged passes refused" in run(program, rounds)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
@pytest.mark.timeout(700)
def test_builds_for_other_processors_compute_the_same_bits(tmp_path: Path) -> None:
    """The processor's own instructions, and those of processors whose registers hold 8 numbers."""
    outputs = set()
    for level in ("native", "x86-64-v3"):
        (tmp_path / level).mkdir()
        outputs.add(run(compiled(tmp_path / level, f"-march={level}"), 20))
    assert len(outputs) == 1
