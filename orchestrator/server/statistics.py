"""Statistics of speculation: counts by source and by depth, and the papers' formulas for comparison.

Papers use two lengths, and both are reported: tokens per step *with* the bonus or recovered token (acceptance length;
Leviathan's E[#tokens], EAGLE's τ), and accepted draft tokens per step, *without* it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.core.proposal import Proposal
from orchestrator.core.tree import MAX_NODES
from orchestrator.core.types import Acceptance, EngineSpeculationResult


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


def best_gamma(alpha: float, c: float, max_gamma: int = MAX_NODES) -> int:
    """Return the draft length in 0..max_gamma with the largest walltime gain, the shortest among equals.

    Invariant: it is greater than 0 if and only if α > c (Leviathan et al. 2023, corollary 3.9).
    """
    return max(range(max_gamma + 1), key=lambda gamma: (walltime_gain(alpha, gamma, c), -gamma))


@dataclass
class SourceCount:
    """Draft tokens of one source."""

    num_drafted: int = 0
    num_accepted: int = 0


@dataclass
class Statistics:
    """Running totals of the steps of one sequence.

    Tokens of the output that another server generated, and that this one continues, do not count.
    num_accepted_tokens: accepted draft tokens that the client gets; tokens after a stop do not count.
    step_lengths: tokens that each step added to the output. step_drafts: draft tokens of each step; an engine that
    drafts by itself reports them for several passes at once, and they count in the first. step_accepted: accepted draft
    tokens of each step that the client gets.
    drafted, tested, accepted: per depth d ≥ 1 (index d − 1), the draft tokens proposed at d; the steps whose accepted
    path reached depth d − 1 and had a draft below its end; and the steps that accepted a token of depth d.
    num_levels: sum of the depths of all trees.
    draft_s, target_s, timed_levels, num_timed_steps: time to propose, time from the target's calls to its answers,
    levels drafted and number of steps, all without the first answer, whose pass includes the prompt.
    num_plain, plain_s: number of those steps that had no draft, and their part of target_s.
    num_cached_tokens: prompt tokens that the target found in its cache.
    num_in_pass: requests in a pass of the target or in separate passes beside it, summed over the passes.
    responses: for each response, as a client that streams gets it, when it was made (time.monotonic()) and how many
    tokens it has; the steps of a run that arrived together share one.
    queue_us, step_forward_us, verify_us: parts of target_s. emit_s: time to turn tokens into text and responses; in a
    run it overlaps with later steps.
    """

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_levels: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    timed_levels: int = 0
    num_timed_steps: int = 0
    num_plain: int = 0
    plain_s: float = 0.0
    step_lengths: list[int] = field(default_factory=list)
    step_drafts: list[int] = field(default_factory=list)
    step_accepted: list[int] = field(default_factory=list)
    sources: dict[str, SourceCount] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_in_pass: int = 0
    num_cached_tokens: int = 0
    forward_us: int = 0
    began_s: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    responses: list[tuple[float, int]] = field(default_factory=list)
    queue_us: int = 0
    step_forward_us: int = 0
    verify_us: int = 0
    emit_s: float = 0.0

    def observe(
        self, proposal: Proposal, acceptance: Acceptance, num_emitted: int, draft_s: float, target_s: float
    ) -> None:
        """Count one step of the loop; the client gets the first `num_emitted` of its tokens."""
        is_first = not self.num_steps
        if is_first:
            self.first_token_s = time.monotonic() - self.began_s
            self.num_cached_tokens = acceptance.num_cached_tokens
        else:
            self.draft_s += draft_s
            self.target_s += target_s
            self.timed_levels += int(proposal.tree.depths.max())
            if not proposal.tree.num_nodes and not acceptance.engine_speculation:
                self.num_plain += 1
                self.plain_s += target_s
            self.queue_us += acceptance.queue_us
            self.step_forward_us += acceptance.forward_us
            self.verify_us += acceptance.verify_us
        if acceptance.engine_speculation:
            lengths = self._observe_engine_speculation(acceptance.engine_speculation, num_emitted)
        else:
            lengths = [num_emitted]
            self._observe_proposal(proposal, acceptance.path, num_emitted)
        self.num_steps += len(lengths)
        self.num_timed_steps += 0 if is_first else len(lengths)
        self.step_lengths += lengths
        self.num_in_pass += acceptance.num_in_pass * len(lengths)
        self.forward_us += acceptance.forward_us

    def note_response(self, num_tokens: int) -> None:
        """Note that a response with so many tokens is made now."""
        self.responses.append((time.monotonic(), num_tokens))

    def _observe_engine_speculation(self, result: EngineSpeculationResult, num_emitted: int) -> list[int]:
        """Count the passes of an engine that drafts by itself; return how many tokens the client gets from each.

        Depths are not counted: the engine does not report its trees.
        """
        lengths: list[int] = []
        for length in result.lengths:
            if (left := num_emitted - sum(lengths)) > 0:
                lengths.append(min(length, left))
        accepted = [min(got, of - 1) for got, of in zip(lengths, result.lengths, strict=False)]
        self._count(result.method, result.num_drafted, sum(accepted))
        self.step_drafts += [result.num_drafted, *[0] * len(lengths)][: len(lengths)]
        self.step_accepted += accepted
        return lengths

    def _observe_proposal(self, proposal: Proposal, path: Sequence[int], num_emitted: int) -> None:
        self.step_drafts.append(proposal.tree.num_nodes)
        self.step_accepted.append(min(len(path), num_emitted))
        if not proposal.tree.num_nodes:
            return
        self.num_levels += int(proposal.tree.depths.max())
        emitted = Counter(proposal.sources[node - 1] for node in path[:num_emitted])
        for source, num_drafted in Counter(proposal.sources).items():
            self._count(source, num_drafted, emitted[source])
        self._observe_depths(proposal, path)

    def _count(self, source: str, num_drafted: int, num_accepted: int) -> None:
        count = self.sources.setdefault(source, SourceCount())
        count.num_drafted += num_drafted
        count.num_accepted += num_accepted
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted

    def _observe_depths(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Count the draft tokens, the tests and the acceptances of each depth."""
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
    def num_tokens(self) -> int:
        """Tokens that the client gets."""
        return sum(self.step_lengths)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step, the bonus or recovered token included; 0 before the first step."""
        return self.num_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted ÷ drafted tokens; 0 when nothing was drafted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def alpha(self) -> float:
        """Accepted ÷ tested levels: the papers' α, which they assume equal at every depth; 0 when nothing was drafted.

        For a chain under `rejection` its expectation is E[Σ min(p, q)] over the prefixes that were tested.
        """
        return sum(self.accepted) / max(sum(self.tested), 1)

    @property
    def gamma(self) -> float:
        """Levels drafted per step."""
        return self.num_levels / max(self.num_steps, 1)

    @property
    def verify_cost(self) -> float:
        """Mean time of a step ÷ that of a plain step; 1, as the papers assume, if there was no plain step."""
        if not self.plain_s:
            return 1.0
        return self.target_s / max(self.num_timed_steps, 1) * self.num_plain / self.plain_s

    @property
    def c(self) -> float:
        """Mean time of a drafted level ÷ that of a plain step, or of all steps if there was no plain step."""
        if not self.timed_levels or not self.target_s:
            return 0.0
        return self.draft_s / self.timed_levels * self.num_timed_steps / self.target_s * self.verify_cost

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics, ready for JSON; docs/statistics.md explains each key."""
        steps = max(self.num_steps, 1)
        return {
            "time_to_first_token_ms": 1e3 * self.first_token_s,
            "total_ms": 1e3 * (time.monotonic() - self.began_s),
            "forward_ms": self.forward_us / 1e3,
            "step_ms": self._step_ms(),
            "num_cached_tokens": self.num_cached_tokens,
            "requests_per_pass": self.num_in_pass / steps,
            "num_steps": self.num_steps,
            "acceptance_length": self.acceptance_length,
            "accepted_per_step": self.num_accepted_tokens / steps,
            "draft_acceptance_rate": self.acceptance_rate,
            "sources": {name: asdict(count) for name, count in self.sources.items()},
            "depths": {
                "drafted": self.drafted,
                "tested": self.tested,
                "accepted": self.accepted,
                "acceptance": [a / t if t else 0.0 for a, t in zip(self.accepted, self.tested, strict=True)],
            },
            "model": self._model(),
        }

    def _step_ms(self) -> dict[str, float]:
        """Return the mean time of a step and of its parts in ms, without the first step, which includes the prompt.

        `emit` includes the first step, but not the last step if its responses are still being made.
        """
        steps = max(self.num_timed_steps, 1)
        target_ms, in_pass_ms = 1e3 * self.target_s, (self.queue_us + self.step_forward_us + self.verify_us) / 1e3
        parts = {
            "total": 1e3 * (time.monotonic() - self.began_s - self.first_token_s),
            "draft": 1e3 * self.draft_s,
            "call": target_ms - in_pass_ms,
            "queue": self.queue_us / 1e3,
            "forward": self.step_forward_us / 1e3,
            "verify": self.verify_us / 1e3,
            "emit": 1e3 * self.emit_s,
        }
        return {name: ms / steps for name, ms in parts.items()}

    def _model(self) -> dict[str, float]:
        """Return the measured α, γ, c and gain, what the formulas predict, and where the difference is lost."""
        alpha, gamma, c = self.alpha, self.gamma, self.c
        best, expected = best_gamma(alpha, c), walltime_gain(alpha, gamma, c)
        at_plain_cost = self.acceptance_length / (gamma * c + 1)
        realised = self.acceptance_length / (gamma * c + self.verify_cost)
        return {
            "alpha": alpha,
            "gamma": gamma,
            "timed_levels": self.timed_levels,
            "c": c,
            "expected_tokens_per_step": expected_tokens(alpha, gamma),
            "verify_cost": self.verify_cost,
            "expected_gain": expected,
            "realised_gain": realised,
            "lost_to_acceptance": expected - at_plain_cost,
            "lost_to_verification": at_plain_cost - realised,
            "best_gamma": best,
            "best_gain": walltime_gain(alpha, best, c),
        }
