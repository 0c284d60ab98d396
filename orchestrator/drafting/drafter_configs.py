"""The parameters of the methods that call a drafter, and what they ask of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from orchestrator.core.sampling_params import Sampling
from orchestrator.core.static_trees import MAX_DEPTH, MAX_WIDTH
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import HeadInput
from orchestrator.drafting.draft_sampling import DraftSamplingConfig
from orchestrator.drafting.parameters import Choices

#: The defaults of min_prob. On a CPU, an additional row takes about a quarter of a plain pass
#: (docs/performance.md, min_prob), on a GPU little.
MIN_PROB, MIN_PROB_OF_CHEAP_ROWS = 0.4, 0.2
#: The default of max_nodes of a tree.
NUM_NODES = 24


class DrafterConfig(DraftSamplingConfig):
    """Parameters of all drafters. min_prob: how likely a path must seem to the drafter; None = depends on the device.

    sharpness: how sure the drafter is of its guesses: 1 = as sure as its q, None = its own, as measured.
    draws: under a rule that reads q, the nodes are sampled from it.
    """

    draws: bool = True
    min_prob: float | None = Field(None, ge=0.0, le=1.0)
    sharpness: float | None = Field(None, ge=0.01, le=1.0)

    def resolved(self, has_cheap_rows: bool) -> Self:
        """Return the parameters with min_prob set. has_cheap_rows: additional rows hardly make a pass longer."""
        default = MIN_PROB_OF_CHEAP_ROWS if has_cheap_rows else MIN_PROB
        return self if self.min_prob is not None else self.model_copy(update={"min_prob": default})

    @property
    def shape(self) -> HeadInput:
        """The drafter's input without hidden states."""
        return HeadInput(min_prob=self.min_prob or 0.0, sharpness=self.sharpness or 0.0)

    def under(self, sampling: Sampling, head: HeadInput) -> HeadInput:
        """Return the drafter's input, which asks for sampling if the rule compares p with q. sampling: the draft's."""
        return replace(head, draws=self.draws and sampling.rule.uses_q and not sampling.greedy)

    def as_member(self) -> Self:
        """Return the parameters for use beside other methods' drafts, where sampled drafts would lose their q."""
        return self.model_copy(update={"draws": False})


class DraftModelConfig(DrafterConfig):
    """draft_len: maximum tokens of a path (γ). top_k: 1 = a chain, which also ends after a path below min_prob.

    Above 1 it is the width of a tree, as in `DynamicConfig`, of NUM_NODES nodes unless max_nodes is set.
    """

    draft_len: int = Field(5, ge=1, le=MAX_NODES)
    top_k: int = Field(1, ge=1, le=MAX_WIDTH)

    @model_validator(mode="after")
    def _limit_tree(self) -> Self:
        """Give a tree as many nodes as a head's, unless max_nodes is set."""
        if not self.is_chain and "max_nodes" not in self.model_fields_set:
            object.__setattr__(self, "max_nodes", NUM_NODES)
        return self

    @property
    def is_chain(self) -> bool:
        """True when no node has siblings."""
        return self.top_k == 1

    @property
    def shape(self) -> HeadInput:
        """How many nodes a level of a tree expands, and how likely they must seem."""
        return replace(super().shape, width=0 if self.is_chain else self.top_k)

    def under(self, sampling: Sampling, head: HeadInput) -> HeadInput:
        """Return the input; a chain that should not be sampled although the rule reads q is a tree of width 1."""
        is_chosen = self.is_chain and sampling.rule.uses_q and not self.draws
        return replace(super().under(sampling, head), width=1 if is_chosen else head.width)

    def as_member(self) -> Self:
        """Return the parameters for use beside other methods' drafts; a chain stays as native code drafts it."""
        return self if self.is_chain else super().as_member()


class HeadConfig(DrafterConfig):
    """Parameters of a drafting head."""

    max_nodes: int = Field(NUM_NODES, ge=0, le=MAX_NODES)

    @property
    def is_chain(self) -> bool:
        """True when no node of the tree has siblings."""
        shape = self.shape
        return shape.choices.is_chain if shape.choices.num_nodes else shape.width == 1

    @property
    def num_levels(self) -> int:
        """The maximum number of levels of the tree."""
        return MAX_DEPTH


class StaticConfig(HeadConfig):
    """choices: the tree, as all its nodes or as its leaf paths; empty = the best `max_nodes` nodes of the head's own.

    Choices are cut only if max_nodes is set.
    """

    choices: Choices = TokenTree.bare()

    @model_validator(mode="after")
    def _make_room(self) -> Self:
        """Allow as many nodes as the choices name, unless max_nodes is set."""
        if self.choices.num_nodes and "max_nodes" not in self.model_fields_set:
            object.__setattr__(self, "max_nodes", self.choices.num_nodes)
        return self

    @property
    def shape(self) -> HeadInput:
        """The static tree, and how likely its nodes must seem."""
        return replace(super().shape, choices=self.choices)

    @property
    def num_levels(self) -> int:
        """The maximum number of levels of the tree."""
        return int(self.choices.depths.max()) or super().num_levels


class DynamicConfig(HeadConfig):
    """top_k: nodes that a level expands, and children of each. depth: maximum levels. max_nodes: nodes kept."""

    top_k: int = Field(6, ge=1, le=MAX_WIDTH)
    depth: int = Field(10, ge=1, le=MAX_DEPTH)

    @property
    def shape(self) -> HeadInput:
        """How many nodes a level expands, and how likely they must seem."""
        return replace(super().shape, width=self.top_k)

    @property
    def num_levels(self) -> int:
        """The maximum number of levels of the tree."""
        return self.depth


class RedrafterConfig(HeadConfig):
    """beams: width of the beam search. beam_len: tokens of a beam, the root not counted."""

    beams: int = Field(5, ge=1, le=MAX_WIDTH)
    beam_len: int = Field(5, ge=1, le=8)

    @property
    def shape(self) -> HeadInput:
        """How many beams there are, and how likely they must seem."""
        return replace(super().shape, width=self.beams)

    @property
    def num_levels(self) -> int:
        """The maximum number of levels of the tree."""
        return self.beam_len
