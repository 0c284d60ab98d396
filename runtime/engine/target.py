"""The target engine: one pass over the trees of all requests, acceptance beside the logits, commit to the cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.errors import ServingError
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import MAX_FEATURE_ROWS, Acceptance, StepOptions
from orchestrator.sampling.accept import AcceptedPath
from orchestrator.sampling.grammar import Grammars
from orchestrator.wire.target import StepRequest
from runtime.engine.calls import EngineCall
from runtime.engine.paged import PagedModel
from runtime.engine.verify import VerifyInput, VerifyResult, verify
from runtime.kv.batch import Segment
from runtime.kv.sequences import CachedSequence, SequenceTable
from runtime.sampling import distribution
from runtime.sampling.accept import AcceptInput
from runtime.sampling.logits_processors import logits_processors_of, preparation

StepCall = EngineCall[StepRequest]


class TargetEngine:
    """Answers target steps; implements `runtime.engine.calls.Engine`.

    Invariant: an answer depends on its own request alone, not on the others in the pass (exactly so in float64).
    """

    def __init__(self, paged: PagedModel, grammars: Grammars | None = None) -> None:
        """grammars: what structured output is checked with; None = there is none."""
        self.paged = paged
        self._grammars = grammars

    @property
    def sequences(self) -> SequenceTable:
        """The sequences that it holds."""
        return self.paged.sequences

    def preparation(self, request: StepRequest) -> Callable[[], None] | None:
        """Return what is to be done before the request is submitted, on another thread; None as a rule."""
        return preparation(request.delta, request.sampling, self._grammars)

    def advance(self, jobs: list[StepCall]) -> list[StepCall]:
        """Run one pass: whole steps, and parts of the contexts that are too long for one pass."""
        jobs = [job for job in jobs if job.sequence or self._open(job)]
        shares = [(job, _with_tree(job, segment)) for job, segment in self.paged.plan(jobs)]
        if not shares:
            return jobs
        began = time.monotonic()
        logits = self.paged.forward([segment for _, segment in shares])
        done = self._answer(shares, logits, began)
        return [job for job in jobs if job not in done]

    def _open(self, job: StepCall) -> bool:
        tree = job.request.tree
        return self.paged.open(job, tree.num_nodes, int(tree.depths.max()))

    def _answer(self, shares: list[tuple[StepCall, Segment]], logits: Tensor, began_s: float) -> set[StepCall]:
        finished, rows = _finished_rows(shares)
        if not finished:
            return set()
        logits = logits[rows]
        verdicts = verify([self._question(job, segment) for job, segment in finished], logits)
        forward_us = int((time.monotonic() - began_s) * 1e6)
        parts = logits.split([segment.tree.num_nodes + 1 for _, segment in finished])
        for (job, segment), part, verdict in zip(finished, parts, verdicts, strict=True):
            if isinstance(verdict, ServingError):
                self.sequences.drop(job.sequence_id)
                job.reply(verdict)
                continue
            answer = self._settle(job, segment, part, verdict)
            job.reply(replace(answer, forward_us=forward_us, num_in_pass=len(shares)))
        return {job for job, _ in finished}

    def _question(self, job: StepCall, segment: Segment) -> VerifyInput:
        request, sequence = job.request, job.opened
        return VerifyInput(
            AcceptInput(request.tree, request.q, segment.last, request.sampling),
            sequence.context,
            logits_processors_of(sequence, request.sampling, job.delta.prompt_len, self._grammars),
            request.options.target_tokens,
        )

    def _settle(self, job: StepCall, segment: Segment, logits: Tensor, verdict: VerifyResult) -> Acceptance:
        """Commit what was accepted, and put together what the step wants to know; logits: (m + 1, V)."""
        walk, target_tokens = verdict
        options, sequence = job.request.options, job.opened
        self._commit(sequence, segment.tree, walk)
        features, features_start = self._features(sequence, options)
        rows = [0, *walk.path]
        top_ids, top_logprobs = (
            distribution.top_log_probs(logits[rows], options.num_top) if options.num_top else (None, None)
        )
        return Acceptance(
            walk.path,
            walk.next_token,
            target_tokens=np.array(target_tokens, np.int32) if options.target_tokens else None,
            logprobs=_logprobs(logits[rows], segment.tree, walk) if options.logprobs else None,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            features=features,
            features_start=features_start,
            num_cached_tokens=sequence.num_cached,
        )

    def _commit(self, sequence: CachedSequence, tree: TokenTree, walk: AcceptedPath) -> None:
        """Keep the accepted path alone: its rows move to the slots right behind the old root's."""
        prefix_len = len(sequence.ids)
        moves = [
            (sequence.slot(prefix_len + node - 1), sequence.slot(prefix_len + level))
            for level, node in enumerate(walk.path)
            if node != level + 1
        ]
        if moves:
            self.paged.cache.move([s for s, _ in moves], [d for _, d in moves])
        accepted = [int(tree.tokens[node - 1]) for node in walk.path]
        sequence.context.commit([*accepted, walk.next_token])
        sequence.num_computed = prefix_len + len(walk.path)
        sequence.publish(len(sequence.ids))

    def _features(self, sequence: CachedSequence, options: StepOptions) -> tuple[np.ndarray | None, int]:
        """Return the newest rows from want.features_from on, (r, width) float32, and the first one's position."""
        store = self.paged.cache.features[:, self.paged.model.taps.columns(options.hidden_states)]
        if options.features_from is None or not store.shape[1]:
            return None, 0
        stop = sequence.num_computed
        start = max(options.features_from, stop - MAX_FEATURE_ROWS, 0)
        # A drafter that claims to have seen more than there is gets no row.
        rows = [sequence.slot(i) for i in range(start, stop)]
        slots = torch.tensor(rows, dtype=torch.long, device=store.device)
        return store[slots].float().cpu().numpy(), start


def _with_tree(job: StepCall, segment: Segment) -> Segment:
    """Attach the drafts to the segment that ends in the root."""
    if segment.last == job.delta.prefix_len:
        segment.tree = job.request.tree
    return segment


def _finished_rows(
    shares: list[tuple[StepCall, Segment]],
) -> tuple[list[tuple[StepCall, Segment]], list[int]]:
    """Return the shares that end in their root, and the logit rows that belong to them."""
    finished: list[tuple[StepCall, Segment]] = []
    rows: list[int] = []
    start = 0
    for job, segment in shares:
        stop = start + segment.tree.num_nodes + 1
        if segment.last == job.delta.prefix_len:
            finished.append((job, segment))
            rows += range(start, stop)
        start = stop
    return finished, rows


def _logprobs(logits: Tensor, tree: TokenTree, walk: AcceptedPath) -> np.ndarray:
    """Return the model's own log-probability of each emitted token; logits: (a + 1, V)."""
    tokens = [int(tree.tokens[node - 1]) for node in walk.path] + [walk.next_token]
    return np.array(distribution.log_probs_of(logits, tokens))
