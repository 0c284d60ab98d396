"""The error type of the build scripts, and how a command reports it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from orchestrator.core.errors import ServingError


class BuildError(ServingError):
    """A problem that the user can fix, described in one sentence."""


def run_command(main: Callable[[], None]) -> None:
    """Run `main`; an error that the user can fix becomes one line on stderr and exit status 2."""
    try:
        main()
    except ServingError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
