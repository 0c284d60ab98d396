"""Drafts under a grammar: removes those that it forbids, which need not be verified."""

from __future__ import annotations

from orchestrator.core.proposal import Proposal
from orchestrator.core.sampling.grammar_matcher import Matcher
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import StepOptions


def legal_drafts(matcher: Matcher, proposal: Proposal, sampling: Sampling, options: StepOptions) -> Proposal:
    """Return the drafts that the grammar allows after the output that the matcher has followed.

    options: what the proposer needs from the step that verifies them.
    Invariant: the text stays the same, since the target would not accept the others. Two kinds of proposal are
    returned unchanged: drafts sampled from q under a rule that reads q, where leaving out a node because of its token
    would bias the text; and those of a proposer that learns from the target's tokens at all its nodes.
    """
    if options.target_tokens or not proposal.tree.num_nodes or (proposal.q and sampling.rule.uses_q):
        return proposal
    return proposal.only(matcher.legal_nodes(proposal.tree))
