"""The native index of n-grams against a search of the text, under sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from native.library import LIBRARY
from tests.unit.native.forward.test_sanitizers import COMPILER, FLAGS, needs_compiler


@needs_compiler
@pytest.mark.timeout(300)
def test_places_are_those_that_a_search_finds_in_few_allocations(tmp_path: Path) -> None:
    """Whoever frees an index keeps Python's global lock: one allocation per n-gram would stop all requests meanwhile."""
    program, source = tmp_path / "ngrams", Path(__file__).with_name("ngrams.cpp")
    flags = [*FLAGS, "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{LIBRARY.folder}"]
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(program)], check=True, timeout=200)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 10_000
