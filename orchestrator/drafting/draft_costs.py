"""What drafts bring and cost, over all requests of a process."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.core.cost_model import CostModel
from orchestrator.core.step_costs import Mean

#: The fraction of all requests' time that trials may take, and the steps of a trial.
TRIAL_TIME_SHARE, TRIAL_STEPS = 0.01, 6


class HeadFigures(NamedTuple):
    """What the steps with one head brought and cost, on average.

    tokens: how many tokens a step would have committed with the head's whole draft alone. rows: nodes of that draft.
    draft_s: time to make it. first_s: time of the first draft after the head was idle, for which it first reads the
    text that it has missed.
    """

    tokens: Mean = Mean()
    rows: Mean = Mean()
    draft_s: Mean = Mean()
    first_s: Mean = Mean()

    def step_s(self, costs: CostModel) -> float:
        """Return the expected time of a step with the head."""
        return self.draft_s.value + float(costs.seconds[min(round(self.rows.value), len(costs.seconds) - 1)])

    def rate(self, costs: CostModel) -> float:
        """Return the expected tokens of the batch per second."""
        return (self.tokens.value + costs.others_tokens) / self.step_s(costs)


@dataclass
class LevelFigures:
    """What one kind of adaptive drafts cost, on average. seconds: time to draft a level. rows: nodes of a level.

    probe_s: time of a step whose draft only probes whether drafts pay again, counted for every request of its pass.
    idle_s: time of the steps that requests of this kind have run since the last draft.
    """

    seconds: Mean = field(default_factory=Mean)
    rows: Mean = field(default_factory=Mean)
    probe_s: Mean = field(default_factory=Mean)
    idle_s: float = 0.0

    @property
    def may_probe(self) -> bool:
        """True if a probe would take no more than its share of the time since the last draft."""
        return self.probe_s.value <= TRIAL_TIME_SHARE * self.idle_s


@dataclass
class DraftCosts:
    """What the drafts of all requests of a process brought and cost.

    by_head: what heads brought to `auto`, by head and temperature range. by_kind: the levels of adaptive drafts.
    elapsed_s: time of the steps of all requests of `auto`. tried_s: time of the steps that tried a head, counted for
    every request of their passes.
    """

    by_head: dict[tuple[str, int], HeadFigures] = field(default_factory=dict)
    by_kind: dict[Hashable, LevelFigures] = field(default_factory=dict)
    elapsed_s: float = 0.0
    tried_s: float = 0.0

    def of(self, name: str, temperature_range: int) -> HeadFigures:
        """Return the figures of a head."""
        return self.by_head.get((name, temperature_range), HeadFigures())

    def levels(self, *kind: Hashable) -> LevelFigures:
        """Return what the levels of one kind of adaptive drafts cost."""
        return self.by_kind.setdefault(kind, LevelFigures())

    @property
    def may_try(self) -> bool:
        """True if trials have taken less than their share of the time."""
        return self.tried_s < TRIAL_TIME_SHARE * self.elapsed_s
