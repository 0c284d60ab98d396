"""Token Recycling: a static tree of what the target last found most probable after each token (Luo et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.methods import METHODS
from orchestrator.core.proposal import Budget, Proposal, Proposer, Step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.static_trees import RECYCLING_CHILDREN, best_first, tree_of_choices, usual_accuracy
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Acceptance
from orchestrator.drafting.adjacency import NUM_FOLLOWERS, AdjacencyMatrix, Indices
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.parameters import WHERE, Choices, MethodConfig

#: The published tree, its most probable nodes first, so that the first n of them are worth most.
PUBLISHED = best_first(
    tree_of_choices([(*parent, rank) for parent, count in RECYCLING_CHILDREN.items() for rank in range(count)]),
    usual_accuracy(depth=6, first=0.5, kept=0.9),
)


class RecyclingConfig(MethodConfig):
    """choices: the tree, as all its nodes or as its leaf paths; empty = the published one, its best nodes first.

    max_nodes: maximum nodes of it, among those whose tokens are known; choices are cut only if it is set.
    from_prompt: begin with what followed each token in the prompt.
    """

    max_nodes: int = Field(4, ge=0, le=MAX_NODES)
    choices: Choices = TokenTree.bare()
    from_prompt: bool = True

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        """Allow as many nodes as the choices name, unless max_nodes is set; raises RequestError for a rank too high."""
        highest = int(self.choices.tokens.max(initial=0))
        if highest >= NUM_FOLLOWERS:
            raise RequestError(
                f"choices must have ranks in 0..{NUM_FOLLOWERS - 1}, since as many tokens are kept, "
                f"got {highest} ({WHERE})"
            )
        if self.choices.num_nodes and "max_nodes" not in self.model_fields_set:
            object.__setattr__(self, "max_nodes", self.choices.num_nodes)
        return self

    @property
    def is_chain(self) -> bool:
        """True when no node of the tree has siblings."""
        return bool(self.choices.num_nodes) and self.choices.is_chain


class Level(NamedTuple):
    """The nodes of one depth, their parents, and their ranks among all followers of the parent; each (n,)."""

    nodes: Indices
    parents: Indices
    ranks: Indices


class Recycling(Proposer):
    """Lays the followers of the root, their followers and so on into a static tree, breadth first.

    What the target finds likeliest after each verified token, accepted or not, replaces what was known of that token. A
    token that this request does not know is looked up in the matrix that requests share, if there is one.
    A proposal costs one look-up per level, however long the context.
    Source: Token Recycling, Luo et al. 2024, arXiv:2408.08696; docs/methods/recycling.md.
    """

    name = "recycling"
    needs = METHODS[name].options

    def __init__(self, config: RecyclingConfig, dependencies: ProposerDependencies) -> None:
        self._matrix = AdjacencyMatrix(dependencies.vocab_size)
        self._shared = dependencies.shared_adjacency() if dependencies.shared_adjacency else None
        self._shape = config.choices if config.choices.num_nodes else PUBLISHED
        self._levels = levels_of(self._shape)
        self._reads_prompt = config.from_prompt
        self._root = 0

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return the part of the static tree whose tokens are known."""
        if self._reads_prompt:
            self._reads_prompt = False
            self._matrix.learn_text(context.ids[: context.prompt_len])
        self._root = context.root + 1
        tokens = np.zeros(self._shape.num_nodes + 1, np.int32)
        tokens[0] = self._root
        for level in self._levels[: budget.max_depth]:
            tokens[level.nodes] = self._followers(tokens[level.parents], level.ranks)
        known = np.flatnonzero(tokens[1:]).astype(np.int32) + 1
        tree = TokenTree(tokens[1:] - 1, self._shape.parents).only(known)
        return Proposal.of(tree, self.name).cut(budget)

    def observe(self, steps: Sequence[Step]) -> None:
        """Learn what the target finds likeliest after each node; of equal tokens, the last on the path counts."""
        for step in steps:
            self._learn(step.proposal.tree, step.acceptance)

    def _learn(self, tree: TokenTree, acceptance: Acceptance) -> None:
        if acceptance.node_top_ids is None:
            return
        is_accepted = np.zeros(tree.num_nodes + 1, np.bool_)
        is_accepted[[0, *acceptance.path]] = True
        nodes = is_accepted.argsort(kind="stable")
        tokens = np.concatenate([[self._root], tree.tokens + 1])[nodes]
        for matrix in filter(None, (self._matrix, self._shared)):
            matrix.learn(tokens, acceptance.node_top_ids[nodes])

    def _followers(self, tokens: Indices, ranks: Indices) -> Indices:
        """Return each token's follower at its rank, 0 if unknown; all followers of a token come from one matrix."""
        own = self._matrix.followers(tokens, ranks)
        if self._shared is None:
            return own
        return np.where(self._matrix.knows(tokens), own, self._shared.followers(tokens, ranks))


def levels_of(shape: TokenTree) -> list[Level]:
    """Return the levels of a static tree, whose tokens are ranks, from depth 1 on."""
    depths = shape.depths
    levels = []
    for depth in range(1, int(depths.max()) + 1):
        nodes = np.flatnonzero(depths == depth)
        levels.append(Level(nodes, shape.parents[nodes - 1].astype(np.intp), shape.tokens[nodes - 1].astype(np.intp)))
    return levels
