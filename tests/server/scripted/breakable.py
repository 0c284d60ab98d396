"""The real Triton model `target`, whose engine breaks outside a pass when the file `break` appears in SCRIPT_FOLDER."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import runtime.engine.paged
from launcher.server import REPOSITORY
from runtime.engine.kv.sequences import SequenceTable

ORDER = Path(os.environ["SCRIPT_FOLDER"]) / "break"


class BreakableTable(SequenceTable):
    """Fails where no request is to blame: in the engine's housekeeping."""

    def drop_idle(self, now_s: float, busy: set[int]) -> None:
        if ORDER.exists():
            ORDER.unlink()
            raise RuntimeError("broken by a test")
        super().drop_idle(now_s, busy)


runtime.engine.paged.SequenceTable = BreakableTable  # type: ignore[misc]
TritonPythonModel = runpy.run_path(str(REPOSITORY / "target/1/model.py"))["TritonPythonModel"]
