"""Estimates of how likely a draft node is to be accepted, by its source and by the proposer's evidence for it."""

from __future__ import annotations

from collections.abc import Hashable

#: Weight of all earlier outcomes of a node's kind, per outcome: of a request, and of the deployment.
DISCOUNT, PRIOR_DISCOUNT = 0.99, 0.998
#: How many outcomes the prior counts for.
PRIOR_WEIGHT = 16.0
#: The estimate before any outcome: optimistic, so that every proposer is tried.
FIRST = 0.7


class AcceptanceEstimates:
    """Discounted counts of accepted and tested nodes for each kind of node.

    prior: the estimates of the deployment, which a request's own ones start from and report to; None: `FIRST`.
    Source: the Beta–Bernoulli estimate with a geometric discount, as in discounted bandits (Garivier and Moulines 2011,
    arXiv:0805.3415, section 2).
    """

    def __init__(self, prior: AcceptanceEstimates | None = None) -> None:
        self._prior = prior
        self._discount = DISCOUNT if prior else PRIOR_DISCOUNT
        self._counts: dict[Hashable, tuple[float, float]] = {}  # kind → accepted, tested

    def observe(self, kind: Hashable, is_accepted: bool) -> None:
        """Count the outcome of a node whose parent was accepted."""
        accepted, tested = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = (self._discount * accepted + is_accepted, self._discount * tested + 1.0)
        if self._prior:
            self._prior.observe(kind, is_accepted)

    def probability(self, kind: Hashable) -> float:
        """Return the estimated probability that a node of this kind is accepted if its parent is."""
        accepted, tested = self._counts.get(kind, (0.0, 0.0))
        prior = self._prior.probability(kind) if self._prior else FIRST
        return (accepted + PRIOR_WEIGHT * prior) / (tested + PRIOR_WEIGHT)
