"""How much surer a drafter may be than its own probabilities say; measured for each, and kept in its config.json."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import HeadInput

#: The smallest sharpness allowed; 0 would be a division by zero.
LEAST = 0.01


class Sharpness(NamedTuple):
    """How q becomes the confidences by which trees grow; each in LEAST … 1, where 1 means q itself, as in the papers.

    argmax: the divisor of log q at temperature 0; above, where the noise decides, a drafter is as sure as its q.
    sampled: a token sampled from q is accepted with probability about 1 − sampled · (1 − q).
    `python -m build.heads.sharpness` measures both (docs/methods/eagle.md, Confidence).
    """

    argmax: float = 1.0
    sampled: float = 1.0

    def of(self, head: HeadInput, sampling: Sampling) -> float:
        """Return the sharpness of a call's confidences: the request's if set, otherwise the drafter's own."""
        return head.sharpness or (self.sampled if head.draws else self.argmax if sampling.greedy else 1.0)


#: Without a measurement.
AS_SURE_AS_Q = Sharpness()
