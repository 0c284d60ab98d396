"""Compiles the native libraries while an image is built, for the levels of x86-64 that are named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from native.compiling import LEVELS_VARIABLE
from native.drafts_library import LIBRARY as DRAFTS
from native.library import LIBRARY as FORWARD
from native.sampling import LIBRARY as SAMPLING


def main(levels: list[str]) -> None:
    """Compile for each level; a compiler that fails ends the build of the image."""
    for level in levels:
        os.environ[LEVELS_VARIABLE] = level
        print(FORWARD.build(), SAMPLING.build(), DRAFTS.build(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
