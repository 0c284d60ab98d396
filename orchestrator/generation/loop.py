"""The main loop: propose → step → observe → emit, until the text ends. It knows neither Triton nor models."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import StepOptions, Target
from orchestrator.generation.statistics import Statistics
from orchestrator.generation.text import Chunk, FinishReason, Output
from orchestrator.generation.trace import Trace

Guard = Callable[[], FinishReason | None]
Emit = Callable[[Chunk], None]


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


@dataclass
class SequenceState:
    """One sequence of a request on its way through the loop.

    options: what the client needs from every step. trace: records the steps, if the client asked for them.
    """

    context: Context
    sampling: Sampling
    limits: Limits
    output: Output
    options: StepOptions = field(default_factory=StepOptions)
    statistics: Statistics = field(default_factory=Statistics)
    trace: Trace | None = None


def generate(sequence: SequenceState, target: Target, proposer: Proposer, guard: Guard, emit: Emit) -> None:
    """Generate until the output finishes or `guard` returns a reason to stop; emit one chunk per step.

    Invariant: the emitted tokens are those of `orchestrator.sampling.reference.generate`, whatever the proposer.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; trees: SpecInfer, arXiv:2305.09781.
    """
    context, sampling, output = sequence.context, sequence.sampling, sequence.output
    while output.finish is None:
        if reason := guard():
            emit(Chunk(output.close(reason), [], []))
            break
        budget, began_s = sequence.limits.budget(context), time.perf_counter()
        proposal = proposer.propose(context, sampling, budget).cut(budget)
        drafted_s = time.perf_counter()
        options = sequence.options.merged(proposer.options)
        acceptance = target.step(context, proposal.tree, sampling, options, proposal.q)
        stepped_s = time.perf_counter()
        tokens = acceptance.tokens(proposal.tree)
        context.commit(tokens)
        proposer.observe(proposal.tree, acceptance)
        chunk = output.push(tokens, [] if acceptance.logprobs is None else acceptance.logprobs.tolist())
        chunk.top_ids, chunk.top_logprobs = acceptance.top_tokens(len(chunk.ids))
        sequence.statistics.observe(proposal, acceptance, len(chunk.ids), drafted_s - began_s, stepped_s - drafted_s)
        if sequence.trace:
            sequence.trace.observe(proposal, acceptance)
        emit(chunk)
