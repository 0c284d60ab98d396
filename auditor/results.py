"""The results of an audit: what each check examined and what it found wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One value that differs from the expected one.

    where: the request and the step. near_tie: whether rounding in the served dtype explains the difference.
    """

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
    """One line of the report.

    counts: how much was examined. bounds: sentences that say how wrong the server may still be.
    lossy: whether the rule changes the distribution by design; its findings are shown and do not count as faults.
    """

    check: str
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)
    lossy: bool = False

    def add(self, what: str, where: str, expected: Any, got: Any, near_tie: bool = False) -> None:
        """Add a finding."""
        self.findings.append(Finding(what, where, str(expected), str(got), near_tie))

    def expect(self, what: str, where: str, expected: Any, got: Any) -> bool:
        """Add a finding unless both values are equal; return whether they are."""
        if expected != got:
            self.add(what, where, expected, got)
        return bool(expected == got)

    @property
    def faults(self) -> list[Finding]:
        """The findings that fail the audit."""
        return [] if self.lossy else [finding for finding in self.findings if not finding.near_tie]

    def to_dict(self) -> dict[str, Any]:
        """Return the result for the JSON report."""
        # asdict rebuilds a Counter from its items, which would count the items instead.
        return asdict(self) | {"counts": dict(self.counts), "num_faults": len(self.faults)}
