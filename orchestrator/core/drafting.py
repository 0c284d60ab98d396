"""The proposing and learning side of a sequence's steps; it runs in the loop or in the target's engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import StepOptions


@dataclass(frozen=True)
class Limits:
    """What bounds a sequence and its trees.

    max_tokens: maximum output tokens. max_positions: longest context. max_nodes: maximum draft nodes of a tree.
    """

    max_tokens: int
    max_positions: int
    max_nodes: int

    def budget(self, context: Context) -> Budget:
        """Return the budget of the next tree: no level beyond the context limit or the last output token."""
        tokens_left = self.max_tokens - (len(context) - context.prompt_len)
        depth = min(tokens_left - 1, self.max_positions - len(context))
        return Budget(self.max_nodes, max(depth, 0))


@dataclass
class Drafting:
    """Proposes the tree of each step, then commits what was accepted.

    proposer: its trees must be within the budget; `Guarded` sees to that. options: what the client needs from every
    step. draft_s: seconds that the last proposal took.
    """

    context: Context
    sampling: Sampling
    limits: Limits
    proposer: Proposer
    options: StepOptions = field(default_factory=StepOptions)
    draft_s: float = 0.0

    def begin(self) -> None:
        """Begin the next proposal, so that it can be made together with those of other sequences."""
        self.proposer.begin(self.context, self.sampling, self.limits.budget(self.context))

    def propose(self) -> tuple[Proposal, StepOptions]:
        """Return the tree of the next step, within the budget, and what is needed from that step."""
        began_s, budget = time.perf_counter(), self.limits.budget(self.context)
        proposal = self.proposer.propose(self.context, self.sampling, budget)
        self.draft_s = time.perf_counter() - began_s
        return proposal, self.options.merged(self.proposer.needs)

    def commit(self, steps: Sequence[Step]) -> None:
        """Commit the tokens of steps, and let the proposer learn."""
        for step in steps:
            self.context.commit(step.tokens)
        self.proposer.observe(steps)
