"""`python -m tests.trtllm_corrections`: takes each correction of the TensorRT-LLM path back and wants its test to fail.

The table is that of docs/tensorrt-llm-source.md; each correction takes a process of pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.mutant import ENVIRONMENT, ROOT
from tests.support.trtllm_corrections import CORRECTIONS, Correction

PASSED, FAILED = 0, 1
LIMIT_S = 300


def run(correction: Correction) -> tuple[int, str]:
    """Run the test without the correction; return pytest's exit status and its first error."""
    mutant = {ENVIRONMENT: json.dumps([correction.file, correction.sound, correction.broken])}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.support.mutant", "-p", "no:cacheprovider"]
    command += [correction.test, *(["-k", correction.cases] if correction.cases else [])]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | mutant, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    errors = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    return done.returncode, errors[0] if errors else done.stdout[-300:] + done.stderr[-300:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all corrections, or those whose name begins with an argument; 1 when a test does not notice."""
    parser = argparse.ArgumentParser(prog="python -m tests.trtllm_corrections", description=__doc__)
    parser.add_argument("names", nargs="*", default=[""], help="how the names begin, 7 for example (default: all)")
    wanted = tuple(parser.parse_args(arguments).names)
    unnoticed = 0
    for correction in (each for each in CORRECTIONS if each.name.startswith(wanted)):
        status, error = run(correction)
        verdict = {FAILED: "noticed", PASSED: "NOT NOTICED"}.get(status, f"pytest ended with {status}")
        unnoticed += status != FAILED
        print(f"{correction.name}: {verdict}: {error[:200]}", flush=True)
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
