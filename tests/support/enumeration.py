"""Exact distributions: runs a randomised procedure through all its outcomes and adds up their probabilities."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from orchestrator.core.arrays import FloatArray

Outcome = TypeVar("Outcome", bound=Hashable)


class Branch:
    """One run of a procedure: earlier choices are replayed, new ones take their first possible outcome.

    Implements `auditor.reference.rules.NoiseSource`, and samples drafts for the tests.
    """

    def __init__(self, replayed: list[int]) -> None:
        self.choices: list[tuple[int, tuple[int, ...]]] = []
        self.probability = 1.0
        self._replayed = replayed

    def choose(self, probs: FloatArray) -> int:
        """Return an outcome with its probability; probs need not sum to 1."""
        possible = tuple(int(i) for i in np.flatnonzero(probs))
        index = self._replayed[len(self.choices)] if len(self.choices) < len(self._replayed) else 0
        self.choices.append((index, possible))
        self.probability *= float(probs[possible[index]] / probs.sum())
        return possible[index]

    def accept(self, probability: float, position: int, child: int) -> bool:
        """Return True with this probability."""
        assert -1e-12 <= probability <= 1 + 1e-12
        likely = min(max(probability, 0.0), 1.0)
        return self.choose(np.array([1.0 - likely, likely])) == 1

    def recover(self, probs: FloatArray, position: int) -> int:
        """Return a token sampled from probs."""
        return self.choose(probs)

    def following(self) -> list[int] | None:
        """Return the choices of the next run, or None after the last."""
        choices = list(self.choices)
        while choices and choices[-1][0] + 1 == len(choices[-1][1]):
            choices.pop()
        return [index for index, _ in choices[:-1]] + [choices[-1][0] + 1] if choices else None


def law(procedure: Callable[[Branch], Outcome]) -> dict[Outcome, float]:
    """Return the probability of every outcome of a procedure that makes its choices with the branch it receives."""
    found: dict[Outcome, float] = {}
    replayed: list[int] | None = []
    while replayed is not None:
        branch = Branch(replayed)
        outcome = procedure(branch)
        found[outcome] = found.get(outcome, 0.0) + branch.probability
        replayed = branch.following()
    return found
