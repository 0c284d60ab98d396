"""The draft engine: a small language model that proposes a chain, picking with the target's own noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution, DraftResponse
from orchestrator.sampling.grammar import Grammars
from orchestrator.sampling.sampled_drafts import MAX_CANDIDATES, cut, draw
from orchestrator.wire.drafter import DraftRequest
from runtime.engine.calls import EngineCall
from runtime.engine.paged import PagedModel
from runtime.kv.batch import Segment
from runtime.kv.sequences import SequenceTable
from runtime.sampling import distribution
from runtime.sampling.logits_processors import logits_processors_of, preparation

DraftCall = EngineCall[DraftRequest]


class DraftEngine:
    """Answers draft calls; implements `runtime.engine.calls.Engine`.

    A sequence's ids are the committed context and, behind it, the tokens drafted so far; what the target
    accepts of them is found computed at the next call.
    Invariant: token i of a chain is argmax(log q + noise) at position prefix_len + i. Under `coupled` it is the noise that
    the target adds to log p there, so that both pick alike as often as q resembles p; under the other rules it is the
    drafter's own, and q goes along.
    """

    def __init__(self, paged: PagedModel, grammars: Grammars | None = None) -> None:
        self.paged = paged
        self._grammars = grammars

    @property
    def sequences(self) -> SequenceTable:
        """The sequences that it holds."""
        return self.paged.sequences

    def preparation(self, request: DraftRequest) -> Callable[[], None] | None:
        """Return what is to be done before the request is submitted, on another thread; None as a rule."""
        return preparation(request.delta, request.sampling, self._grammars)

    def advance(self, jobs: list[DraftCall]) -> list[DraftCall]:
        """Draft one more token for every request whose context is computed, and a part of the others' context."""
        jobs = [job for job in jobs if job.sequence or self._open(job)]
        shares = self.paged.plan(jobs)
        if not shares:
            return jobs
        logits = self.paged.forward([segment for _, segment in shares])
        self._extend(shares, logits)
        done = [job for job in jobs if _num_drafted(job) >= self._length(job)]
        for job in done:
            job.reply(_drafted(job))
        return [job for job in jobs if job not in done]

    def _open(self, job: DraftCall) -> bool:
        length = self._length(job)
        if length < 1:
            job.reply(DraftResponse(TokenTree.bare()))
            return False
        job.drawn_from.clear()
        return self.paged.open(job, length, length)

    def _length(self, job: DraftCall) -> int:
        """Return how many tokens to draft: what is asked for, as far as the draft model's own context reaches."""
        room = self.paged.model.max_positions - job.delta.prefix_len
        return min(job.request.max_nodes, job.request.max_depth, room)

    def _extend(self, shares: list[tuple[DraftCall, Segment]], logits: Tensor) -> None:
        """Append a drafted token to the sequences that are computed to their end; logits: (len(shares), V)."""
        ready = [row for row, (_, s) in enumerate(shares) if s.last == len(s.sequence.ids)]
        if not ready:
            return
        jobs = [shares[row][0] for row in ready]
        shaped = torch.cat([self._shaped(job, logits[row, None]) for job, row in zip(jobs, ready, strict=True)])
        for job, token in zip(jobs, _picked(jobs, shaped), strict=True):
            job.opened.publish(job.delta.prefix_len)
            job.opened.context.commit([token])

    def _shaped(self, job: DraftCall, logits: Tensor) -> Tensor:
        """Return (1, V) logits as the request wants them; what was drafted so far counts as said."""
        sequence, prefix_len = job.opened, job.delta.prefix_len
        logits_processors = logits_processors_of(sequence, job.request.sampling, job.delta.prompt_len, self._grammars)
        if logits_processors is None:
            return logits
        shaped = logits.to(torch.float64, copy=True)
        logits_processors.apply(shaped, sequence.context, prefix_len, [sequence.ids[prefix_len:]])
        return shaped.to(logits.dtype)


def _picked(jobs: list[DraftCall], logits: Tensor) -> list[int]:
    """Return the next token of each draft; under a rule that asks for it, note what it was drawn from.

    logits: (len(jobs), V).
    """
    positions, rules = [len(job.opened.ids) for job in jobs], [job.request.sampling for job in jobs]
    drawn = [row for row, rule in enumerate(rules) if rule.rule is not Rule.COUPLED]
    if not drawn:
        return distribution.target_tokens(logits, positions, rules)
    tokens: dict[int, int] = {}
    for row, q in zip(drawn, candidates(logits[drawn].double(), [rules[row] for row in drawn]), strict=True):
        jobs[row].drawn_from.append(q)
        tokens[row] = draw(q, positions[row], rules[row], jobs[row].delta.prefix_len)
    if picked := [row for row in range(len(jobs)) if row not in tokens]:
        places = [positions[row] for row in picked]
        tokens |= zip(
            picked, distribution.target_tokens(logits[picked], places, [rules[row] for row in picked]), strict=True
        )
    return [tokens[row] for row in range(len(jobs))]


def candidates(logits: Tensor, rules: Sequence[Sampling]) -> list[Distribution]:
    """Return q of every row: its MAX_CANDIDATES most probable tokens; logits: (n, V) float64."""
    log_q = distribution.log_p(logits, rules)
    top = log_q.topk(min(MAX_CANDIDATES, log_q.shape[-1]), dim=-1)
    ids, order = top.indices.sort(dim=-1)
    probs = top.values.gather(-1, order).exp()
    return [cut(*row) for row in zip(ids.int().cpu().numpy(), probs.cpu().numpy(), strict=True)]


def _num_drafted(job: DraftCall) -> int:
    return len(job.opened.ids) - job.delta.prefix_len


def _drafted(job: DraftCall) -> DraftResponse:
    prefix_len = job.delta.prefix_len
    cached_len = min(job.opened.num_computed, prefix_len)
    return DraftResponse(TokenTree.chain(job.opened.ids[prefix_len:]), tuple(job.drawn_from), cached_len)
