"""Random passes, sound and damaged, and quantised products: under sanitizers, compiled for several processors."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from native.compiling import _processor
from native.library import LIBRARY

DRIVER = Path(__file__).with_name("fuzz.cpp")
FLAGS = ["-std=c++17", "-Og", "-g", "-ffp-contract=off", "-pthread"]
#: Rounds whose results are compared bit by bit.
NUM_COMPARED = 40
#: The compiler's options for processors that multiply quads in different ways → the instruction sets that they have.
PROCESSORS = {
    "-march=x86-64": "sse2",
    "-march=x86-64-v3 -fsanitize=address,undefined -fno-sanitize-recover=all": "avx2 fma f16c",
    "-march=x86-64-v3 -mavxvnni": "avx2 fma f16c avx_vnni",
    "-march=x86-64-v4 -mavx512vnni": "avx512f avx512bw avx512dq avx512vl avx512_vnni",
}
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
@pytest.mark.long
@pytest.mark.timeout(700)
def test_no_pass_leaves_its_arrays_and_every_processor_computes_the_same_bits(tmp_path: Path) -> None:
    """This processor's own instructions, and those of processors whose registers hold 8 numbers.

    The latter have no products of bfloat16, which are then computed by other instructions.
    """
    programs = []
    for sanitizers, level, rounds in (("address,undefined", "native", 150), ("thread", "x86-64-v3", NUM_COMPARED)):
        (tmp_path / level).mkdir()
        march = level if platform.machine() == "x86_64" else "native"
        flags = f"-march={march}", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"
        programs.append(compiled(tmp_path / level, *flags))
        assert "damaged passes refused" in run(programs[-1], rounds)
    first, second = (run(program, NUM_COMPARED) for program in programs)
    assert first == second


@needs_compiler
@pytest.mark.timeout(400)
def test_quantized_products_have_the_bits_of_scalar_loops_on_every_processor(tmp_path: Path) -> None:
    """The driver compares; what this processor cannot run is only compiled."""
    source, results = DRIVER.with_name("quantized.cpp"), set()
    for number, flags in enumerate(PROCESSORS if platform.machine() == "x86_64" else {"": ""}):
        program = tmp_path / str(number)
        options = *FLAGS, *flags.split(), "-O1", f"-I{LIBRARY.folder}"
        command = [
            str(COMPILER),
            *options,
            str(source),
            str(LIBRARY.folder / "forward/product.cpp"),
            "-o",
            str(program),
        ]
        subprocess.run(command, check=True, timeout=200)
        if set(PROCESSORS.get(flags, "").split()) <= set(_processor().split()):
            results.add(run(program, 1))
    assert len(results) == 1
