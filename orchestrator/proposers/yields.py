"""What the drafters bring and cost when `auto` uses them, over all requests of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.core.step_costs import Mean, Surface

#: The part of the time of all requests that trials may take, and the steps of one.
TRIED, TRIAL_STEPS = 0.01, 6


class Yield(NamedTuple):
    """What the steps with one head brought and cost.

    tokens: a step would have committed with the head's whole draft alone. rows: that were sent. draft_s: of its draft.
    first_s: of the first draft of a stretch, in which the head reads what it lacks of the text.
    """

    tokens: Mean = Mean()
    rows: Mean = Mean()
    draft_s: Mean = Mean()
    first_s: Mean = Mean()

    def step_s(self, surface: Surface) -> float:
        """Return the expected time of a step with the head."""
        return self.draft_s.value + float(surface.seconds[min(round(self.rows.value), len(surface.seconds) - 1)])

    def rate(self, surface: Surface) -> float:
        """Return the expected tokens of the batch per second."""
        return (self.tokens.value + surface.others_tokens) / self.step_s(surface)


@dataclass
class HeadYields:
    """What each head brought to all requests of a process, by range of temperature.

    elapsed_s: of all requests' steps. tried_s: of those that were made to try a head.
    """

    by_head: dict[tuple[str, int], Yield] = field(default_factory=dict)
    elapsed_s: float = 0.0
    tried_s: float = 0.0

    def of(self, name: str, temperature_range: int) -> Yield:
        """Return what a head brought."""
        return self.by_head.get((name, temperature_range), Yield())

    @property
    def may_try(self) -> bool:
        """True if the trials have taken less than their part of the time."""
        return self.tried_s < TRIED * self.elapsed_s
