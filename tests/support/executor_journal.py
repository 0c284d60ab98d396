"""Reads what the stand-in's executor does in a server's process, and controls it (tests/standin, _journal.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.clients import until


class ExecutorJournal:
    """The events of one executor since this object was made."""

    def __init__(self, folder: Path, engine: str) -> None:
        self._journal, self._passes = folder / f"{engine}.journal", folder / f"{engine}.passes"
        self._break = folder / f"{engine}.break"
        self._num_before = len(self._all())

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one name."""
        return [event for event in self._all()[self._num_before :] if event["event"] == name]

    def ids(self, name: str) -> list[int]:
        """Return the request ids of the events of one name."""
        return [event["id"] for event in self.events(name)]

    @property
    def under_way(self) -> set[int]:
        """The requests that the executor has."""
        return set(self.ids("enqueued")) - set(self.ids("ended"))

    @property
    def most_at_once(self) -> int:
        """The most requests in one pass."""
        return max((len(event["ids"]) for event in self.events("pass")), default=0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let the executor run no more passes meanwhile, except those that `leave` allows."""
        self._passes.write_text("0")
        try:
            yield
        finally:
            self._passes.unlink()

    def leave(self, num_passes: int = 1) -> None:
        """Let a held executor run `num_passes` more passes than it has run by now."""
        num_run = max((event["number"] for event in self._all() if event["event"] == "pass"), default=0)
        self._passes.write_text(str(num_run + num_passes))

    def break_down(self) -> None:
        """Let the executor die, as when its worker does."""
        self._break.touch()

    def await_enqueued(self, count: int) -> None:
        """Wait until `count` requests have come."""
        until(lambda: len(self.ids("enqueued")) >= count, f"{count} requests at the executor")

    def _all(self) -> list[dict[str, Any]]:
        if not self._journal.exists():
            return []
        lines = self._journal.read_text().split("\n")[:-1]  # the last may be half a line
        return [json.loads(line) for line in lines]
