"""NOT TensorRT-LLM: the real Triton model of this name, with the stand-in in place of the package `tensorrt_llm`.

The stub ignores PYTHONPATH, hence this file.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from launcher.server import REPOSITORY

ROOT = REPOSITORY.parent
sys.path[:0] = [str(ROOT / "tests/standin"), str(ROOT)]
NAME = Path(__file__).parts[-3]
TritonPythonModel = runpy.run_path(str(REPOSITORY / NAME / "1/model.py"))["TritonPythonModel"]
