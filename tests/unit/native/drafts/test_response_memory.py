"""The memory of responses under sanitizers, while threads learn and draft at once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from native.library import LIBRARY
from tests.unit.native.forward.test_sanitizers import COMPILER, FLAGS, needs_compiler


@needs_compiler
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.timeout(300)
def test_threads_may_learn_and_draft_at_once(tmp_path: Path, sanitizers: str) -> None:
    program, source = tmp_path / "memory", Path(__file__).with_name("response_memory.cpp")
    flags = [*FLAGS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{LIBRARY.folder}"]
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(program)], check=True, timeout=200)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 1000
