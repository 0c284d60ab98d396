"""What drafting brought: counts by source and by depth, and the papers' formulas beside them; all pure.

Two conventions of length are in use and both are given: tokens per step *with* the bonus or recovered token
(acceptance length; Leviathan's E[#tokens], EAGLE's τ), and accepted draft tokens per step, *without* it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.core.proposal import Proposal
from orchestrator.core.tree import MAX_NODES
from orchestrator.core.types import EngineSpeculationResult


def expected_tokens(alpha: float, gamma: float) -> float:
    """Return E[tokens per step] = (1 − α^(γ+1)) / (1 − α), bonus or recovered token included.

    alpha: probability in [0, 1] that a drafted token is accepted, the same at every depth. gamma: draft length ≥ 0.
    Source: Leviathan et al. 2023, arXiv:2211.17192, equation 1.
    """
    return gamma + 1 if alpha >= 1.0 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def walltime_gain(alpha: float, gamma: float, c: float) -> float:
    """Return the expected speed-up over plain decoding, E[tokens per step] / (γc + 1).

    c: time of one drafter step ÷ time of one target step.
    Source: Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations_factor(alpha: float, gamma: float, c_hat: float) -> float:
    """Return by how much arithmetic grows, (γĉ + γ + 1) / E[tokens per step].

    c_hat: arithmetic per token of the drafter ÷ that of the target.
    Source: Leviathan et al. 2023, arXiv:2211.17192, theorem 3.11.
    """
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, max_gamma: int = MAX_NODES) -> int:
    """Return the draft length in 0..max_gamma with the largest walltime gain; the shortest of equals.

    Invariant: greater than 0 if and only if α > c (Leviathan et al. 2023, corollary 3.9).
    """
    return max(range(max_gamma + 1), key=lambda gamma: (walltime_gain(alpha, gamma, c), -gamma))


@dataclass
class SourceCount:
    """Draft tokens of one source."""

    num_drafted: int = 0
    num_accepted: int = 0


@dataclass
class Tally:
    """Running totals of one request's steps.

    num_accepted_tokens: those that the client gets; behind a stop nothing counts.
    drafted, tested, accepted: by depth d ≥ 1 (index d − 1), the draft tokens proposed there; the steps whose accepted
    path reached depth d − 1 and found a draft below it; and those in which one of depth d was accepted.
    num_levels: depths of all trees, summed. draft_s, target_s, timed_levels: proposing, verifying, and levels of the
    steps behind the first, whose pass holds the prompt.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_levels: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    timed_levels: int = 0
    step_lengths: list[int] = field(default_factory=list)
    sources: dict[str, SourceCount] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def observe(
        self, proposal: Proposal, path: Sequence[int], num_emitted: int, draft_s: float, target_s: float
    ) -> None:
        """Count one step: what was proposed, which nodes were accepted, how many tokens the client gets, the times."""
        self._observe_times(int(proposal.tree.depths.max()), draft_s, target_s)
        self.num_steps += 1
        self.num_draft_tokens += proposal.tree.num_nodes
        self.num_accepted_tokens += len(path[:num_emitted])
        self.step_lengths.append(num_emitted)
        self._observe_sources(proposal, path[:num_emitted])
        self._observe_depths(proposal, path)

    def observe_engine_speculation(self, burst: EngineSpeculationResult, num_emitted: int, target_s: float) -> int:
        """Count the passes of an engine that drafts by itself, each as a step; return how many the client has of.

        Depths stay uncounted: the engine does not say what its trees were.
        """
        lengths: list[int] = []
        for length in burst.lengths:
            if (left := num_emitted - sum(lengths)) > 0:
                lengths.append(min(length, left))
        num_accepted = sum(min(got, of - 1) for got, of in zip(lengths, burst.lengths, strict=False))
        self._observe_times(0, 0.0, target_s)
        self.num_steps += len(lengths)
        self.step_lengths += lengths
        self.num_draft_tokens += burst.num_drafted
        self.num_accepted_tokens += num_accepted
        count = self.sources.setdefault(burst.method, SourceCount())
        count.num_drafted += burst.num_drafted
        count.num_accepted += num_accepted
        return len(lengths)

    def _observe_times(self, num_levels: int, draft_s: float, target_s: float) -> None:
        self.num_levels += num_levels
        if self.num_steps:
            self.draft_s += draft_s
            self.target_s += target_s
            self.timed_levels += num_levels

    def _observe_sources(self, proposal: Proposal, path: Sequence[int]) -> None:
        for source, num_drafted in Counter(proposal.sources).items():
            self.sources.setdefault(source, SourceCount()).num_drafted += num_drafted
        for node in path:
            self.sources[proposal.sources[node - 1]].num_accepted += 1

    def _observe_depths(self, proposal: Proposal, path: Sequence[int]) -> None:
        depths = proposal.tree.depths[1:].tolist()
        for totals in (self.drafted, self.tested, self.accepted):
            totals.extend([0] * (max(depths, default=0) - len(totals)))
        for depth in depths:
            self.drafted[depth - 1] += 1
        for depth in range(len(path)):
            self.tested[depth] += 1
            self.accepted[depth] += 1
        if proposal.tree.children[path[-1] if path else 0]:
            self.tested[len(path)] += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ drafted tokens; 0 when nothing was drafted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def alpha(self) -> float:
        """Accepted ÷ tested levels: the papers' α, were it the same at every depth; 0 when nothing was drafted.

        For a chain under `rejection` its expectation is E[Σ min(p, q)] over the prefixes that were tested.
        """
        return sum(self.accepted) / max(sum(self.tested), 1)

    @property
    def gamma(self) -> float:
        """Levels drafted per step."""
        return self.num_levels / max(self.num_steps, 1)

    @property
    def c(self) -> float:
        """Time of one drafted level ÷ time of one target step; 0 before the second step."""
        if not self.timed_levels or not self.target_s:
            return 0.0
        return self.draft_s / self.timed_levels * (self.num_steps - 1) / self.target_s


def told(tally: Tally) -> dict[str, Any]:
    """Return a request's statistics, ready for JSON (docs/statistics.md has each key)."""
    steps = max(tally.num_steps, 1)
    return {
        "num_steps": tally.num_steps,
        "acceptance_length": sum(tally.step_lengths) / steps,
        "accepted_per_step": tally.num_accepted_tokens / steps,
        "draft_acceptance_rate": tally.acceptance_rate,
        "sources": {name: asdict(count) for name, count in tally.sources.items()},
        "depths": _depths(tally),
        "model": _model(tally),
    }


def _depths(tally: Tally) -> dict[str, list[float]]:
    return {
        "drafted": [*tally.drafted],
        "tested": [*tally.tested],
        "accepted": [*tally.accepted],
        "acceptance": [a / t if t else 0.0 for a, t in zip(tally.accepted, tally.tested, strict=True)],
    }


def _model(tally: Tally) -> dict[str, float]:
    """Return what the formulas make of α, γ and c, beside what was."""
    alpha, gamma, c = tally.alpha, tally.gamma, tally.c
    best = best_gamma(alpha, c)
    length = sum(tally.step_lengths) / max(tally.num_steps, 1)
    return {
        "alpha": alpha,
        "gamma": gamma,
        "c": c,
        "expected_tokens_per_step": expected_tokens(alpha, gamma),
        "expected_gain": walltime_gain(alpha, gamma, c),
        "realised_gain": length / (gamma * c + 1),
        "best_gamma": best,
        "best_gain": walltime_gain(alpha, best, c),
    }
