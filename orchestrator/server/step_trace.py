"""A record of the steps of a sequence, from which `make audit` repeats every decision (docs/auditor.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.core.context import Context
from orchestrator.core.proposal import Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance


@dataclass
class Trace:
    """The recorded steps of one sequence. context, sampling: those of the loop."""

    context: Context
    sampling: Sampling
    steps: list[dict[str, Any]] = field(default_factory=list)

    def observe(self, proposal: Proposal, acceptance: Acceptance) -> None:
        """Record a step whose tokens have been committed.

        The record holds the length and the hash of the context before the step, the tree with the q of its nodes, and
        what was accepted. With the seed and the rule, it gives the keys of all noise of the step (docs/wire.md, Noise).
        """
        prefix_len = len(self.context) - acceptance.num_tokens
        self.steps.append(
            {
                "prefix_len": prefix_len,
                "context_hash": self.context.rolling_hash(prefix_len),
                "node_ids": proposal.tree.tokens.tolist(),
                "node_parents": proposal.tree.parents.tolist(),
                "sources": list(proposal.sources),
                "q": [{"ids": q.ids.tolist(), "weights": q.weights.tolist()} for q in proposal.q],
                "path": list(acceptance.path),
                "extra": list(acceptance.extra),
                "next_token": acceptance.next_token,
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Return prompt, sampling and steps, ready for JSON."""
        prompt = self.context.ids[: self.context.prompt_len]
        return {"prompt_ids": prompt, "sampling": asdict(self.sampling), "steps": self.steps}
