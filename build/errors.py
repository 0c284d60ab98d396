"""The one error type of the build scripts and how a command reports it; knows nothing of what failed."""

import sys
from collections.abc import Callable


class BuildError(Exception):
    """A problem the user can fix, told in one sentence."""


def run_command(main: Callable[[], None]) -> None:
    """Runs `main`; a `BuildError` becomes one line on stderr and exit status 2."""
    try:
        main()
    except BuildError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
