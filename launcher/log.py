"""Prints the launcher's own lines; reads a server's log: why it ended, in one line, and new lines as they come."""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

# The first pattern that matches wins: they are ordered from causes to consequences.
_CAUSES = (
    re.compile(r"(?P<why>error while loading shared libraries: .*)"),
    re.compile(r"(?P<why>Error parsing text-format .*)"),
    re.compile(r"failed to (?:load|poll) (?:model )?'(?P<model>[^']+)'(?: version \d+)?: (?:Internal: )?(?P<why>.*)"),
    re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<why>.*)"),
    re.compile(r"^error: (?:creating server: )?(?P<why>.*)", re.MULTILINE),
    re.compile(r"^E\d{4} \S+ +\d+ \S+\] (?P<why>.*)", re.MULTILINE),
)
#: The length at which a followed log is emptied; its lines have been passed on by then.
MAX_LOG_BYTES = 8 << 20
_NOISE = "CudaDriverHelper has not been initialized"
_WRAPPERS = re.compile(r"^(\w+\.)*(TritonModelException|ServingError|ConfigError|EngineError): ")


def print_error(text: str) -> None:
    """Print one line on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_event(text: str) -> None:
    """Print one line on standard error, after the time in UTC (ISO 8601), as Triton's lines have theirs."""
    print_error(f"{datetime.now(UTC).isoformat(timespec='milliseconds').removesuffix('+00:00')}Z {text}")


def cause(text: str) -> str:
    """Return in one line why a server ended. text: its log."""
    lines = "\n".join(line for line in text.splitlines() if _NOISE not in line)
    for pattern in _CAUSES:
        if match := pattern.search(lines):
            groups = match.groupdict()
            model = f"model {groups['model']}: " if groups.get("model") else ""
            return model + _one_line(groups["why"])
    rest = lines.strip().splitlines()
    return rest[-1] if rest else "it wrote nothing"


def _one_line(why: str) -> str:
    """Cut a message before its traceback, and undo Triton's quoting."""
    text = why.replace('\\"', '"').replace("\\n", "\n").removesuffix('"')
    text = re.split(r"\n\s*At:\n", text)[0]
    return _WRAPPERS.sub("", " ".join(text.split()))


class LogFollower:
    """Reads the lines added to a file, and empties it when it grows long, which its writers, who append, do not notice.

    It is emptied only if all of it has been read. What is written in the microseconds between the check of its length
    and the emptying is lost: at most once in MAX_LOG_BYTES, and rarely even then. It cannot be rotated, because Triton
    keeps the file open.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, path.stat().st_size

    def new_text(self) -> str:
        """Return the complete lines added since the last call."""
        with self._path.open("r+b") as file:
            file.seek(self._offset)
            added, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(added) + len(newline)
            # Looked at as late as possible: reading and splitting megabytes takes longer than writing a line.
            if self._offset > MAX_LOG_BYTES and file.seek(0, os.SEEK_END) == self._offset:
                file.truncate(0)
                self._offset = 0
        return added.decode(errors="replace") + newline.decode()
