"""Counts of picks that differ, and the intervals of their rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

EXACT, PLAIN = "float64", "plain"
NEAR_TIE, CLOSE = 1e-4, 0.1
LIMITS = (NEAR_TIE, 1e-3, 1e-2, 0.03, 0.1)
NUM_TOP = 16
SIZES = (0, 4, 8, 24, 64, 128)
METHODS = ("none", "prompt_lookup", "ngram", "suffix", "lookahead", "draft_model", *(f"made:{n}" for n in SIZES[1:5]))


@dataclass
class Tally:
    """What came of comparing picks, all of them on paths that float64 accepted.

    paths: steps in which the accepted path differs; steps: whose tokens do. chance: sum of the probabilities, over
    seeds, that the two sides' picks differ. gaps: sum of |Δ| of the gap between the two likeliest; close: gaps below
    CLOSE. deltas: |Δ log p| of the NUM_TOP likeliest tokens, how many by 20·log10. margins: of the differing picks,
    each after its place, (prompt, position). places: so many are surely distinct; see `merged`.
    """

    target_tokens: int = 0
    differing: int = 0
    num_steps: int = 0
    steps: int = 0
    paths: int = 0
    chance: float = 0.0
    gaps: float = 0.0
    close: int = 0
    largest: float = 0.0
    deltas: dict[str, int] = field(default_factory=dict)
    margins: list[list[float]] = field(default_factory=list)
    places: int = 0

    def add(self, other: Tally) -> None:
        """Add the counts of another."""
        self.largest, deltas = max(self.largest, other.largest), dict(self.deltas)
        for key, count in other.deltas.items():
            deltas[key] = deltas.get(key, 0) + count
        for name in (f.name for f in fields(self) if f.name not in ("largest", "deltas")):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.deltas = deltas

    def quantile(self, share: float) -> float:
        """Return the |Δ log p| that `share` of them do not exceed, to 12 %; 0 where most are none at all."""
        wanted, seen = share * sum(self.deltas.values()), 0
        for key in sorted(map(int, self.deltas)):
            seen += self.deltas[str(key)]
            if seen >= wanted:
                return 0.0 if key <= -400 else min(10 ** (key / 20), self.largest)
        return 0.0

    @property
    def near(self) -> int:
        """Differing picks that float64 has at a near tie."""
        return sum(margin < NEAR_TIE for *_, margin in self.margins)

    @property
    def distinct(self) -> int:
        """Places at which picks differ, however many methods come by."""
        return len({tuple(place) for *place, _ in self.margins})

    def expected(self, density: float | None) -> float:
        """Return the rate of differing picks that the distributions themselves give, without counting any.

        density: of gaps at 0; the rate is then density · E|Δ gap| / 2 (greedy). None: sampled, exact over all seeds.
        """
        return (self.chance if density is None else density * self.gaps / 2) / self.target_tokens


def interval(count: float, total: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a rate; of none, 0 to 3/n (the rule of three)."""
    if count == 0:
        return 0.0, 3 / max(total, 3)
    z2, rate = 1.959964**2, count / total
    middle = rate + z2 / (2 * total)
    half = math.sqrt(z2 * (rate * (1 - rate) / total + z2 / (4 * total**2)))
    return (middle - half) / (1 + z2 / total), min(1.0, (middle + half) / (1 + z2 / total))
