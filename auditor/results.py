"""What a check found, and what it looked at to find it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it must be. where: request and step. near_tie: rounding in the served dtype explains it."""

    what: str
    where: str
    expected: str
    got: str
    near_tie: bool = False

    def __str__(self) -> str:
        kind = "near tie: " if self.near_tie else ""
        return f"{kind}{self.what}: {self.where}: expected {self.expected}, got {self.got}"


@dataclass
class Result:
    """One line of the report. counts: how much was looked at. bounds: what may still be wrong, in words.

    lossy: of a rule that changes the law and says so; what it measures is shown and fails nothing.
    """

    check: str
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)
    lossy: bool = False

    def note(self, what: str, where: str, expected: Any, got: Any, near_tie: bool = False) -> None:
        """Take in a finding."""
        self.findings.append(Finding(what, where, str(expected), str(got), near_tie))

    def expect(self, what: str, where: str, expected: Any, got: Any) -> bool:
        """Take in a finding unless both are equal; return whether they are."""
        if expected != got:
            self.note(what, where, expected, got)
        return bool(expected == got)

    @property
    def faults(self) -> list[Finding]:
        """The findings that may not be."""
        return [] if self.lossy else [finding for finding in self.findings if not finding.near_tie]

    def told(self) -> dict[str, Any]:
        """Return the result as JSON has it."""
        # asdict makes a Counter anew of its items, and counts those.
        return asdict(self) | {"counts": dict(self.counts), "num_faults": len(self.faults)}
