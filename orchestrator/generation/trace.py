"""What a request's steps were, for whoever wants to decide them anew: `make audit` (docs/losslessness.md, Auditor)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.core.context import Context
from orchestrator.core.proposal import Proposal
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance, Distribution


@dataclass
class Trace:
    """The steps of one sequence; its context and sampling are those of the loop."""

    context: Context
    sampling: Sampling
    steps: list[dict[str, Any]] = field(default_factory=list)

    def observe(self, proposal: Proposal, acceptance: Acceptance) -> None:
        """Take in a step, whose tokens were committed by now.

        What stood before it and its hash, the tree and what its nodes were drawn from, what was accepted: with seed,
        rule and prefix_len these are the keys of all its noise (docs/protocol.md, Noise).
        """
        prefix_len = len(self.context) - acceptance.num_tokens
        step = {
            "prefix_len": prefix_len,
            "context_hash": self.context.rolling_hash(prefix_len),
            "node_ids": proposal.tree.tokens.tolist(),
            "node_parents": proposal.tree.parents.tolist(),
            "sources": list(proposal.sources),
            "q": [_distribution(q) for q in proposal.q],
            "path": list(acceptance.path),
            "extra": list(acceptance.extra),
            "next_token": acceptance.next_token,
        }
        self.steps.append(step)

    def to_dict(self) -> dict[str, Any]:
        """Return prompt, sampling and steps as JSON has them."""
        prompt = self.context.ids[: self.context.prompt_len]
        return {"prompt_ids": prompt, "sampling": asdict(self.sampling), "steps": self.steps}


def _distribution(q: Distribution) -> dict[str, list[Any]]:
    return {"ids": q.ids.tolist(), "weights": q.weights.tolist()}
