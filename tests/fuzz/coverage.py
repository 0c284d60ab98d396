"""`python -m tests.fuzz.coverage`: each parser for some seconds under atheris, which looks for bytes that reach new code.

Needs the extra `fuzz`. exit status: 0 nothing found, 1 a parser raised what it must not (the bytes are kept and shown).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

#: The code whose coverage guides the search.
INSTRUMENTED = ["orchestrator", "gateway", "launcher", "runtime.models.heads.checkpoint", "tests.fuzz.parsers"]
#: Most memory of a parser's process: torch alone takes some 500 MB.
MEMORY_MB = 4096
#: Longest input, in bytes; longest time of one, in seconds.
MAX_BYTES, MAX_S = 8192, 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the parsers one after another; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.coverage", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, metavar="S", help="time of each parser (%(default)s)")
    parser.add_argument("--parsers", nargs="+", default=[], metavar="NAME", help="only these")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(arguments)
    if options.only:
        return _fuzz(options.only, rest)
    import tests.fuzz.parsers as module

    if unknown := set(options.parsers) - set(module.PARSERS):
        parser.error(f"unknown parser {min(unknown)!r} (allowed: {', '.join(module.PARSERS)})")
    found = [
        _run(name, list(module.PARSERS[name].seeds), options.seconds) for name in options.parsers or module.PARSERS
    ]
    return max(found)


def _run(name: str, seeds: list[bytes], seconds: int) -> int:
    """Fuzz a parser in a process of its own; return 1 if something was found."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        corpus, findings = Path(folder) / "corpus", Path(folder) / "findings"
        corpus.mkdir()
        findings.mkdir()
        for number, seed in enumerate(seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        flags = [
            f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MAX_BYTES}", f"-timeout={MAX_S}",
            f"-artifact_prefix={findings}/", "-print_final_stats=1", "-verbosity=0", str(corpus),
        ]  # fmt: skip
        command = [sys.executable, "-m", "tests.fuzz.coverage", "--only", name, *flags]
        environ = {**os.environ, "TMPDIR": folder}  # atheris ends its process without any clean-up
        limit_s = 2 * seconds + 120
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
        output = done.stdout + done.stderr
        units = [line.split()[-1] for line in output.splitlines() if "number_of_executed_units" in line]
        print(f"{name}: {units[0] if units else '?'} inputs in {seconds} s", flush=True)
        if not done.returncode:
            return 0
        print(output[-4000:])
        for file in sorted(findings.iterdir()):
            print(f"{name}: {file.name}: {file.read_bytes()!r}", flush=True)
        return 1


def _fuzz(name: str, flags: list[str]) -> int:
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.parsers import PARSERS
    atheris.Setup([sys.argv[0], *flags], PARSERS[name].check)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
