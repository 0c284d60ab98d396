"""Compiles the native library while an image is built, for the levels of x86-64 that are named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from native.compiling import LEVELS_VARIABLE
from native.library import LIBRARY


def main(levels: list[str]) -> None:
    """Compile for each level; a compiler that fails ends the build of the image."""
    for level in levels:
        os.environ[LEVELS_VARIABLE] = level
        print(LIBRARY.build())


if __name__ == "__main__":
    main(sys.argv[1:])
