"""The main loop: propose → step → observe → emit, until the text ends. Knows neither Triton nor models."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance, StepOptions, Target
from orchestrator.generation.statistics import Tally
from orchestrator.generation.text import Chunk, FinishReason, Output
from orchestrator.generation.trace import Trace

Guard = Callable[[], FinishReason | None]
Emit = Callable[[Chunk], None]


@dataclass
class Progress:
    """What became of one sequence; times in seconds. trace: its steps, where they are to be told."""

    tally: Tally = field(default_factory=Tally)
    num_in_pass: int = 0
    num_cached_tokens: int = 0
    forward_us: int = 0
    began_s: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    trace: Trace | None = None

    def observe(
        self, proposal: Proposal, acceptance: Acceptance, num_emitted: int, draft_s: float, target_s: float
    ) -> None:
        """Count one step."""
        if not self.tally.num_steps:
            self.first_token_s = time.monotonic() - self.began_s
            self.num_cached_tokens = acceptance.num_cached_tokens
        if acceptance.engine_speculation:
            num_passes = self.tally.observe_engine_speculation(acceptance.engine_speculation, num_emitted, target_s)
        else:
            num_passes = 1
            self.tally.observe(proposal, acceptance.path, num_emitted, draft_s, target_s)
        self.num_in_pass += acceptance.num_in_pass * num_passes
        self.forward_us += acceptance.forward_us
        if self.trace:
            self.trace.observe(proposal, acceptance)


@dataclass(frozen=True)
class Limits:
    """max_tokens: most tokens of output. max_positions: longest context. max_nodes: most draft nodes of a tree."""

    max_tokens: int
    max_positions: int
    max_nodes: int

    def budget(self, context: Context) -> Budget:
        """Return what a tree may cost now: no level beyond the context limit or the last token."""
        tokens_left = self.max_tokens - (len(context) - context.prompt_len)
        depth = min(tokens_left - 1, self.max_positions - len(context))
        return Budget(self.max_nodes, max(depth, 0))


def generate(
    context: Context,
    target: Target,
    proposer: Proposer,
    sampling: Sampling,
    limits: Limits,
    options: StepOptions,
    output: Output,
    progress: Progress,
    guard: Guard,
    emit: Emit,
) -> None:
    """Generate until `output` finishes or `guard` names a reason to stop; emits one chunk a step.

    Invariant: the emitted tokens are those of `orchestrator.sampling.distribution.reference.generate`, whatever the proposer.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; trees: SpecInfer, arXiv:2305.09781.
    """
    while output.finish is None:
        if reason := guard():
            emit(Chunk(output.close(reason), [], []))
            break
        budget, began_s = limits.budget(context), time.perf_counter()
        proposal = proposer.propose(context, sampling, budget).cut(budget)
        drafted_s = time.perf_counter()
        acceptance = target.step(context, proposal.tree, sampling, options.joined(proposer.options), proposal.q)
        stepped_s = time.perf_counter()
        tokens = acceptance.tokens(proposal.tree)
        context.commit(tokens)
        proposer.observe(proposal.tree, acceptance)
        chunk = output.push(tokens, acceptance.logprobs_list())
        chunk.top_ids, chunk.top_logprobs = acceptance.top_lists(len(chunk.ids))
        progress.observe(proposal, acceptance, len(chunk.ids), drafted_s - began_s, stepped_s - drafted_s)
        emit(chunk)
