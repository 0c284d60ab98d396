"""The error type of the build scripts, and how a command reports it."""

from __future__ import annotations

import sys
from collections.abc import Callable


class BuildError(Exception):
    """A problem that the user can fix, described in one sentence."""


def run_command(main: Callable[[], None]) -> None:
    """Run `main`; a `BuildError` becomes one line on stderr and exit status 2."""
    try:
        main()
    except BuildError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
