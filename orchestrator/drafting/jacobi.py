"""Jacobi decoding: guesses of the next tokens, replaced by the target's own tokens until both agree."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Literal

from pydantic import Field

from orchestrator.core.context import Context
from orchestrator.core.methods import METHODS
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.parameters import MethodConfig

#: Where guesses come from if no better ones are known: the prompt's tokens in order, or random ones of the whole text.
Fill = Literal["prompt", "random"]


class JacobiConfig(MethodConfig):
    """draft_len: tokens guessed at once (the unknowns of the equations). fill: where first guesses come from."""

    draft_len: int = Field(3, ge=1, le=MAX_NODES)
    fill: Fill = "prompt"


class Jacobi(Proposer):
    """Proposes its guesses y of the tokens after the root, then replaces them by the target's tokens.

    Invariant: y_i ← target token after (x, y_<i), at all positions at once. Accepted guesses are removed at the front,
    and tokens of the text are added at the end. Each step makes at least one more guess right.
    Source: Santilli et al. 2023, arXiv:2305.10427, Algorithm 1; docs/methods/jacobi.md.
    """

    name = "jacobi"
    needs = METHODS[name].options

    def __init__(self, config: JacobiConfig, dependencies: ProposerDependencies) -> None:
        self._draft_len, self._fill = config.draft_len, config.fill
        self._guesses: list[int] = []
        self._spare: Iterator[int] | None = None

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the guesses as a chain."""
        if self._spare is None:
            self._spare = spare_tokens(self._fill, context, sampling.seed)
        self._guesses = filled(self._guesses, self._draft_len, self._spare)
        return Proposal.chain(self._guesses[: budget.clipped(self._draft_len)], self.name)

    def observe(self, steps: Sequence[Step]) -> None:
        """Replace each guess by the target's token; a guess that was not proposed stays at its position."""
        for _, acceptance, *_ in steps:
            guesses = [] if acceptance.target_tokens is None else acceptance.target_tokens.tolist()
            guesses += self._guesses[len(guesses) :]
            self._guesses = guesses[len(acceptance.path) + 1 :]


def spare_tokens(fill: Fill, context: Context, seed: int) -> Iterator[int]:
    """Yield guesses where no better ones are known.

    prompt: the tokens of the prompt in order, again and again. random: sampled from the text that exists when a guess
    is taken, and the same in every run with this seed.
    """
    return cycle(context.ids[: context.prompt_len]) if fill == "prompt" else _random_tokens(context, seed)


def _random_tokens(context: Context, seed: int) -> Iterator[int]:
    numbers = random.Random(seed)
    while True:
        yield numbers.choice(context.ids)


def filled(tokens: list[int], length: int, spare: Iterator[int]) -> list[int]:
    """Return the first `length` of `tokens`; take missing ones from `spare`."""
    return [*tokens[:length], *islice(spare, max(length - len(tokens), 0))]
