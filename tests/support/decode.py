"""The loop around a proposer, without text: the tokens that it emits, and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, models

from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.methods import METHODS
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions, Target
from orchestrator.drafting.dependencies import DrafterClient, ProposerDependencies
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.loop import SequenceState, StepByStep, generate
from orchestrator.server.statistics import Statistics
from orchestrator.server.text import Chunk, Output, StopRule


def dependencies(method: str = "none", **values: Any) -> ProposerDependencies:
    """Return the dependencies of a proposer, without drafters unless a client is given."""
    return ProposerDependencies(
        **{"drafter_client": _no_drafter, "vocab_size": 1 << 20, **values}, method=METHODS[method]
    )


def observe(proposer: Proposer, tree: TokenTree, acceptance: Acceptance) -> None:
    """Let a proposer learn from a step."""
    proposer.observe([Step(Proposal.of(tree, "drafted"), acceptance, 0.0, 0.0)])


def _no_drafter(name: str) -> DrafterClient:
    raise AssertionError(f"this method calls no drafter, but wanted {name}")


def stepping(dependencies_of: Callable[[GenerationRequest], ProposerDependencies]) -> Any:
    """Return a GenerationHandler's function for steps: one call of the target for each."""
    return lambda request, sequence, target: StepByStep(
        sequence, target, request.plan.proposer(dependencies_of(request))
    )


@dataclass
class Strict:
    """Wraps a proposer, and checks that its trees are valid and within the budget without being cut."""

    inner: Proposer
    vocab_size: int = 1 << 20
    name: str = "strict"
    trees: list[TokenTree] = field(default_factory=list)

    @property
    def needs(self) -> StepOptions:
        """Return the options of the inner proposer."""
        return self.inner.needs

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the inner proposer's proposal, checked."""
        proposal = self.inner.propose(context, sampling, budget)
        tree = TokenTree.checked(proposal.tree.tokens, proposal.tree.parents, self.vocab_size, budget.max_nodes)
        assert proposal.cut(budget) is proposal and len(proposal.sources) == tree.num_nodes
        self.trees.append(tree)
        return proposal

    def observe(self, steps: Sequence[Step]) -> None:
        """Pass it on."""
        self.inner.observe(steps)

    def close(self) -> None:
        """Pass it on."""
        self.inner.close()


def decode(
    target: Target,
    proposer: Proposer,
    prompt: Sequence[int],
    sampling: Sampling,
    limits: Limits,
    stop_ids: frozenset[int] = frozenset(),
) -> tuple[list[int], Statistics]:
    """Return the tokens that the loop emits, and its statistics; `Strict` checks the proposer."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    chunks: list[Chunk] = []
    output = Output(tokenizer, prompt, StopRule(limits.max_tokens, stop_ids))
    sequence = SequenceState(Context(prompt), sampling, limits, output)
    generate(sequence, StepByStep(sequence, target, Strict(proposer)), lambda: None, chunks.append)
    return [token for chunk in chunks for token in chunk.ids], sequence.statistics
