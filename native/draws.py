"""Draws from q, the distribution of a drafter (docs/wire.md, Siblings)."""

from __future__ import annotations

from native.sampling import Rows, sampler
from orchestrator.core.arrays import IdArray
from orchestrator.core.noise import Stream
from orchestrator.core.sampled_drafts import draft_distribution
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.types import Distribution


def sample_draft(q: Distribution, position: int, sampling: Sampling, prefix_len: int) -> int:
    """Return the token that the noise of `position` samples from q; ties go to the lowest id.

    prefix_len: number of committed tokens before the step. Under `coupled` the noise is the target's own. Under the
    other rules it must be independent of the noise of acceptance.
    """
    stream, epoch = (Stream.TARGET, 0) if sampling.rule is Rule.COUPLED else (Stream.DRAFT, prefix_len)
    return int(sampler().draw(q, sampling.seed, position, stream, epoch)[0])


def sample_siblings(
    q: Distribution, position: int, sampling: Sampling, prefix_len: int, count: int, parent: int = 0
) -> IdArray:
    """Return `count` tokens sampled from q without replacement, in the order of the draws; all if q has fewer.

    parent: the node whose children they are, 0 for the root. Returns (k,) int32.
    Invariant: the first is distributed as q, each later one as q without those before it, and the children of one
    parent are independent of those of any other. They are the tokens with the highest log q + noise of the drafter
    (Gumbel-top-k; Kool et al. 2019, arXiv:1903.06059).
    """
    return sampler().draw(q, sampling.seed, position, Stream.DRAFT.of_node(parent), prefix_len, count)


def truncated(q: Distribution, sampling: Sampling) -> Distribution:
    """Return q under a request's temperature and truncation."""
    native = sampler()
    rows = Rows.of(native.log(q.probs))
    return draft_distribution(q.ids, native.exp(native.log_p(rows, len(q.ids), [sampling])[0]))
