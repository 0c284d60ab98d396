"""What the proposers of one request may draft from besides the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from native.drafts import NativeEstimates
from native.response_memory import NativeRecollection
from orchestrator.core.context import Context
from orchestrator.core.deployment.config import DRAFT_MAX_SEQUENCES
from orchestrator.core.grammar_matcher import Matcher
from orchestrator.core.messages.drafter import DrafterUse
from orchestrator.core.methods import METHODS, Method
from orchestrator.core.proposal import Budget
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import NO_HEAD_INPUT, DraftResponse, HeadInput
from orchestrator.drafting.adjacency import AdjacencyMatrix
from orchestrator.drafting.corpus import Corpus
from orchestrator.drafting.costs import StepCosts
from orchestrator.drafting.tables import Tables

#: What a client returns if the drafter is late, fails, or breaks the protocol.
NO_ANSWER = DraftResponse(TokenTree.bare(), cached_len=-1)


class DrafterClient(Protocol):
    """One request's client of a drafter; it never raises and never blocks beyond its limit."""

    @property
    def has_given_up(self) -> bool:
        """True when the drafter cannot serve this request, and is no longer called."""

    def begin(self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT) -> None:
        """Begin the call that `propose` makes with the same arguments, so that it can share a pass with others."""

    def propose(
        self, context: Context, sampling: Sampling, budget: Budget, head: HeadInput = NO_HEAD_INPUT
    ) -> DraftResponse:
        """Return the drafter's tree, or NO_ANSWER when it is late. head: for a drafter that reads hidden states."""

    @property
    def use(self) -> DrafterUse | None:
        """How native code can continue from the last draft; None if it cannot, or if there was no answer."""

    def close(self) -> None:
        """Tell the drafter that the request has ended."""


@dataclass(frozen=True)
class ProposerDependencies:
    """What a proposer is built from besides its parameters; every proposer takes what it needs.

    drafter_client: name of a drafter → the request's client of it.
    vocab_size, num_parameters: of the target; num_parameters 0 = unknown.
    prediction: token ids that the client expects as output.
    max_nodes: maximum draft nodes of a tree of this request.
    tables: token statistics of this deployment. memory: earlier responses that this request may draft from.
    corpus: the operator's text, which all requests may draft from.
    shared_adjacency: returns the adjacency matrix that requests with this salt share; None: they share nothing.
    matcher: the position of the output in the grammar that it must match, if there is one.
    step_costs: what the target's passes cost. estimates: how often the candidates of `auto` were accepted.
    draft_max_sequences: a drafter drafts only while at most so many sequences share the target's passes.
    has_cheap_rows: additional rows hardly lengthen a pass, as on a GPU with few requests.
    method: the method to build; the registry sets it.
    """

    drafter_client: Callable[[str], DrafterClient]
    vocab_size: int
    prediction: tuple[int, ...] = ()
    max_nodes: int = MAX_NODES
    num_parameters: int = 0
    tables: Tables | None = None
    memory: NativeRecollection | None = None
    corpus: Corpus | None = None
    shared_adjacency: Callable[[], AdjacencyMatrix] | None = None
    matcher: Matcher | None = None
    step_costs: StepCosts = field(default_factory=StepCosts)
    estimates: NativeEstimates = field(default_factory=NativeEstimates)
    draft_max_sequences: int = DRAFT_MAX_SEQUENCES
    has_cheap_rows: bool = False
    method: Method = METHODS["none"]
