"""Exponential back-off after failures."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Backoff:
    """A pause after each failure, twice as long as the one before until something succeeds; all in seconds."""

    first_s: float
    longest_s: float
    _pause_s: float = 0.0
    _until_s: float = 0.0

    @property
    def is_on(self) -> bool:
        """True during a pause."""
        return time.monotonic() < self._until_s

    def note(self, succeeded: bool) -> None:
        """Note an outcome."""
        self._pause_s = 0.0 if succeeded else min(max(2 * self._pause_s, self.first_s), self.longest_s)
        self._until_s = time.monotonic() + self._pause_s
