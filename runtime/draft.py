"""The draft engine: a small language model that proposes a chain, picking with the target's own noise."""

from __future__ import annotations

from torch import Tensor

from orchestrator.tree import TokenTree
from orchestrator.wire import Drafted, DraftRequest
from runtime import sampling
from runtime.job import Job
from runtime.layout import Segment
from runtime.paged import PagedModel
from runtime.sequences import SequenceTable

DraftJob = Job[DraftRequest]


class DraftEngine:
    """Answers draft calls; implements `runtime.job.Engine`.

    A sequence's ids are the committed context and, behind it, the tokens drafted so far; what the target
    accepts of them is found computed at the next call.
    Law: token i of a chain is argmax(log q + noise) at position prefix_len + i, the same noise that the
    target adds to log p there, so that both pick alike as often as q resembles p.
    """

    def __init__(self, paged: PagedModel) -> None:
        self.paged = paged

    @property
    def sequences(self) -> SequenceTable:
        """The sequences that it holds."""
        return self.paged.sequences

    def advance(self, jobs: list[DraftJob]) -> list[DraftJob]:
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

    def _open(self, job: DraftJob) -> bool:
        length = self._length(job)
        if length < 1:
            job.reply(Drafted(TokenTree.bare(), 0))
            return False
        return self.paged.open(job, length, length)

    def _length(self, job: DraftJob) -> int:
        """Return how many tokens to draft: what is asked for, as far as the draft model's own context reaches."""
        room = self.paged.model.max_positions - job.delta.prefix_len
        return min(job.request.max_nodes, job.request.max_depth, room)

    def _extend(self, shares: list[tuple[DraftJob, Segment]], logits: Tensor) -> None:
        """Append a drafted token to the sequences that are computed to their end; logits: (len(shares), V)."""
        ready = [row for row, (_, s) in enumerate(shares) if s.last == len(s.sequence.ids)]
        if not ready:
            return
        positions = [shares[row][1].last for row in ready]
        rules = [shares[row][0].request.sampling for row in ready]
        for row, token in zip(ready, sampling.picks(logits[ready], positions, rules), strict=True):
            job, segment = shares[row]
            segment.sequence.publish(job.delta.prefix_len)
            segment.sequence.context.commit([token])


def _num_drafted(job: DraftJob) -> int:
    return len(job.opened.ids) - job.delta.prefix_len


def _drafted(job: DraftJob) -> Drafted:
    prefix_len = job.delta.prefix_len
    cached_len = min(job.opened.num_computed, prefix_len)
    return Drafted(TokenTree.chain(job.opened.ids[prefix_len:]), cached_len)
