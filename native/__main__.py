"""`python -m native`: compile the native library, so that the first start of a server need not wait for it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from native.compiling import Unbuilt, compiler
from native.library import LIBRARY


def main(arguments: Sequence[str]) -> int:
    """Compile, or only look for a compiler; return 1 if that fails."""
    parser = argparse.ArgumentParser(prog="python -m native", description=__doc__)
    parser.add_argument("--find-compiler", action="store_true", help="exit with 1 if there is no compiler")
    only_finds = parser.parse_args(arguments).find_compiler
    try:
        began_s = time.monotonic()
        _ = compiler() if only_finds else LIBRARY.build()
    except Unbuilt as error:
        if not only_finds:
            print(f"setup: {error}", file=sys.stderr)
        return 1
    if not only_finds:
        print(f"setup: the native library is compiled ({time.monotonic() - began_s:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
