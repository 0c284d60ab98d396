"""N-gram statistics as the draft model: q from counts, backed off to shorter contexts (Leviathan et al. 2023)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from native.draws import sample_draft, truncated
from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.proposal import Budget, Proposal, Proposer
from orchestrator.core.sampled_drafts import draft_distribution
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import Distribution
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.draft_sampling import DraftSamplingConfig
from orchestrator.drafting.tables import MAX_ORDER, Followers


class NgramConfig(DraftSamplingConfig):
    """order: a token is drafted from the order − 1 tokens before it, or from fewer if these are unknown; 1 = unigrams.

    draft_len: tokens proposed (γ).
    """

    order: int = Field(MAX_ORDER, ge=1, le=MAX_ORDER)
    draft_len: int = Field(2, ge=1, le=MAX_NODES)


class Ngram(Proposer):
    """Samples a chain, token by token, from the tokens that followed the same context in counted text and responses.

    Invariant: over seeds, the token at node i is sampled from q[i − 1], with the noise of
    `native.draws`. At temperature 0 it is the most frequent one, the lowest id among
    equals.
    Costs O(order) lookups per token.
    Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.6 (trivial approximation models).
    """

    name = "ngram"

    def __init__(self, config: NgramConfig, dependencies: ProposerDependencies) -> None:
        """Raises RequestError when the deployment has no token statistics."""
        if dependencies.tables is None and dependencies.memory is None and dependencies.corpus is None:
            raise RequestError(
                "method 'ngram' needs token statistics, and this server has none "
                "(keys ngram_tables, corpus_index and remember_tokens in the deployment file)"
            )
        self._config = config
        self._draft_len = config.draft_len
        self._context_len = config.order - 1
        self._tables = dependencies.tables
        self._memory, self._corpus = dependencies.memory, dependencies.corpus

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Proposal:
        """Return a chain with its q; it ends where no context is known."""
        sampling = self._config.draft_sampling(sampling)
        recent = context.ids[max(len(context) - self._context_len, 0) :]
        tokens: list[int] = []
        q: list[Distribution] = []
        for position in range(len(context), len(context) + budget.clipped(self._draft_len)):
            followers = self._followers(recent)
            if followers is None:
                break
            q.append(q_of(followers, sampling))
            tokens.append(sample_draft(q[-1], position, sampling, len(context)))
            recent.append(tokens[-1])
        return Proposal(TokenTree.chain(tokens), (self.name,) * len(tokens), tuple(q))

    def _followers(self, recent: Sequence[int]) -> Followers | None:
        """Return the tokens that followed the longest known context that ends here."""
        for length in range(min(self._context_len, len(recent)), -1, -1):
            followers = self._counted(recent[len(recent) - length :])
            if followers is not None:
                return followers
        return None

    def _counted(self, context: Sequence[int]) -> Followers | None:
        """Return the tokens that followed a context, with their counts from all sources added up; None if unknown."""
        counted = self._tables.followers(context) if self._tables else None
        found: Counter[int] = Counter()
        for source in (self._memory, self._corpus) if context else ():
            if source:
                found.update(source.followers(context))
        if not found:
            return counted
        if counted:
            found.update(dict(zip(counted.ids.tolist(), counted.weights.tolist(), strict=True)))
        ids = sorted(found)
        return Followers(np.array(ids), np.array([found[token] for token in ids], np.float64))


def q_of(followers: Followers, sampling: Sampling) -> Distribution:
    """Return q: the best followers, renormalised, then under the request's temperature and truncation rules."""
    return truncated(draft_distribution(followers.ids.astype(np.int32), followers.weights), sampling)
