"""The log of a model's process: its lines say when, how grave, which model; the level holds for our packages alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from launcher.command import LOG_LEVELS
from orchestrator.core.deployment.config import LOG_LEVEL
from orchestrator.core.errors import ConfigError
from orchestrator.server import logs

CODE = """
import logging
from orchestrator.server.logs import configure_logging
configure_logging("target")
for name in ("orchestrator.x", "runtime.y", "transformers"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)("a 100 % line")
"""
OURS, ALL = {"orchestrator.x", "runtime.y"}, {"orchestrator.x", "runtime.y", "transformers"}
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) target (\S+): a 100 % line")


def logged(level: str) -> set[tuple[str, str]]:
    """Return (logger, level) of each line of a process of its own, in which no test has set up a log."""
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, LOG_LEVEL: level},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = [LINE.fullmatch(line) for line in run.stderr.splitlines()]
    assert all(found) and not run.stdout
    return {(match[2], match[1]) for match in found if match}


@pytest.mark.parametrize(
    ("level", "names"),
    [
        ("error", {"ERROR": ALL}),
        ("", {"ERROR": ALL, "WARNING": ALL}),
        ("info", {"ERROR": ALL, "WARNING": ALL, "INFO": OURS}),
        ("verbose", {"ERROR": ALL, "WARNING": ALL, "INFO": OURS, "DEBUG": OURS}),
    ],
)
def test_the_level_holds_for_our_packages_and_others_log_warnings_at_most(
    level: str, names: dict[str, set[str]]
) -> None:
    assert logged(level) == {(name, shown) for shown, loggers in names.items() for name in loggers}


def test_the_levels_are_those_of_the_launcher() -> None:
    assert list(logs.LEVELS) == list(LOG_LEVELS)
    with pytest.raises(ConfigError, match=f"unknown log level 'warn'; did you mean 'warning'.*{LOG_LEVEL}"):
        logs.configure_logging("target", {LOG_LEVEL: "warn"})


def test_a_client_s_id_cannot_forge_a_line() -> None:
    assert logs.request_name("a\nERROR") == r"request 'a\nERROR'"
    assert logs.request_name("x" * 1000) == f"request {'x' * logs.MAX_ID!r}"
    assert logs.request_name("") == "a request without an id"
