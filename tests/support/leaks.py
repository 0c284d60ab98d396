"""What must never reach a client: tracebacks, paths of this machine, names of files and of Python internals."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LEAK = re.compile(
    r"Traceback|File \"|\.py\b|site-packages|unpickl|pickle|\bself\.|0x[0-9a-f]{8,}|\.so\b"
    r"|orchestrator[./]|runtime[./]|launcher[./]|pydantic|numpy|(Key|Type|Index|Attribute|Recursion|Value)Error"
    rf"|{re.escape(str(ROOT))}|{re.escape(tempfile.gettempdir())}/|/dev/shm|/proc/"
)


def leak_in(answer: str) -> str:
    """Return the first text in an answer that clients must not see, "" if there is none."""
    found = _LEAK.search(answer)
    return found[0] if found else ""
