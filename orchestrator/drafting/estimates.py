"""How likely a candidate token is: the deployment's counts, corrected by how a request's own text differs."""

from __future__ import annotations

from collections.abc import Hashable

from native.drafts import native_estimates
from orchestrator.core.sampling_params import Sampling

#: Factor by which each outcome discounts all earlier ones of its kind.
DISCOUNT = 0.998
#: The prior probability of a kind weighs as much as this many outcomes.
PRIOR_WEIGHT = 4.0
#: Width of a range of temperatures, and the number of ranges above 0.
RANGE_WIDTH, NUM_RANGES = 0.4, 4
#: Factor by which each outcome discounts a source's earlier ones in a request; the pseudo-counts that they start from.
REQUEST_DISCOUNT, REQUEST_WEIGHT = 0.95, 2.0

#: Clients can join methods in thousands of ways, and counts are never freed. So all unions beyond this many share the
#: counts under this name.
MAX_UNIONS, OTHER_UNIONS = 64, "other unions"


class AcceptanceEstimates:
    """Discounted counts of tested and of accepted tokens for each kind of candidate; any thread may call.

    native: the counts of the native growth, which are then used instead; None where that cannot be compiled.
    Source: the Beta–Bernoulli estimate with a geometric discount, as in discounted bandits (Garivier and Moulines 2011,
    arXiv:0805.3415, section 2).
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}  # kind → accepted, tested
        self._unions: set[str] = set()
        self.native = native_estimates()

    def bounded(self, method: str) -> str:
        """Return the name under which a method's kinds are counted: its own, unless it is one of too many unions."""
        if "+" not in method or method in self._unions:
            return method
        if len(self._unions) >= MAX_UNIONS:
            return OTHER_UNIONS
        self._unions.add(method)
        return method

    def observe(self, kind: Hashable, is_accepted: bool) -> None:
        """Count the outcome of a candidate whose predecessors were all accepted."""
        accepted, tested = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = (DISCOUNT * accepted + is_accepted, DISCOUNT * tested + 1.0)

    def probability(self, kind: Hashable, prior: float) -> float:
        """Return the estimated probability that a candidate of this kind is right; prior: before any outcome."""
        accepted, tested = self._counts.get(kind, (0.0, 0.0))
        return (accepted + PRIOR_WEIGHT * prior) / (tested + PRIOR_WEIGHT)


def range_of(sampling: Sampling) -> int:
    """Return the range of temperatures within which requests share the counts: 0 for greedy ones.

    A sampled text repeats itself far less often than a greedy one, so the counts of one say little about the other.
    """
    return 0 if sampling.greedy else 1 + min(int(sampling.temperature / RANGE_WIDTH), NUM_RANGES - 1)


class RequestOdds:
    """The odds of one source's candidates in one request, relative to what the deployment's counts expect.

    A text that repeats itself more or less than others shows it within a few tokens.
    """

    def __init__(self) -> None:
        self._accepted = self._rejected = self._expected_accepted = self._expected_rejected = REQUEST_WEIGHT

    @property
    def ratio(self) -> float:
        """The request's odds ÷ the expected odds."""
        return self._accepted * self._expected_rejected / (self._rejected * self._expected_accepted)

    def observe(self, probability: float, is_accepted: bool) -> None:
        """Count an outcome; probability: as estimated by the deployment's counts."""
        self._accepted = _discounted(self._accepted, float(is_accepted))
        self._rejected = _discounted(self._rejected, 1.0 - is_accepted)
        self._expected_accepted = _discounted(self._expected_accepted, probability)
        self._expected_rejected = _discounted(self._expected_rejected, 1.0 - probability)


def corrected(probability: float, odds_ratio: float) -> float:
    """Return the probability whose odds are odds_ratio times as high."""
    odds = probability * odds_ratio
    return odds / (1.0 - probability + odds)


def _discounted(count: float, outcome: float) -> float:
    """Return the count with one more outcome; the pseudo-counts are not discounted."""
    return REQUEST_WEIGHT + REQUEST_DISCOUNT * (count - REQUEST_WEIGHT) + outcome
