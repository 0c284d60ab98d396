"""`python -m native`: compile the native libraries, so that the first start of a server need not wait for it.

Without a compiler, torch and numpy compute what the libraries would: slower, with the same results up to rounding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from native.compiling import NativeLibrary, Unbuilt, compiler
from native.drafts_library import LIBRARY as DRAFTS
from native.library import LIBRARY as FORWARD
from native.sampling import LIBRARY as SAMPLING

LIBRARIES: tuple[NativeLibrary, ...] = (FORWARD, SAMPLING, DRAFTS)


def main(arguments: Sequence[str]) -> int:
    """Compile, or only look for a compiler; a library that cannot be built is reported but is not a failure."""
    parser = argparse.ArgumentParser(prog="python -m native", description=__doc__)
    parser.add_argument("--find-compiler", action="store_true", help="exit with 1 if there is no compiler")
    try:
        if parser.parse_args(arguments).find_compiler:
            compiler()
            return 0
        began_s = time.monotonic()
        for library in LIBRARIES:
            library.build()
        print(f"setup: the native libraries are compiled ({time.monotonic() - began_s:.0f} s)")
    except Unbuilt as error:
        if "--find-compiler" in arguments:
            return 1
        print(f"setup: no native forward pass, torch computes the models instead: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
