"""What the engines of all heads have in common: a call is answered as a whole, its tree grown in one pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.errors import EngineError, RequestError, ServingError
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse, FloatArray, IdArray
from orchestrator.wire.calls import DraftRequest
from runtime.engine.calls import EngineCall
from runtime.heads.engines.growth import Dynamic, Growth, Static
from runtime.heads.engines.ranking import rank
from runtime.kv.blocks import BlockPool
from runtime.kv.sequences import SequenceTable

#: Of the time that a call is given: what its answer needs for the way back, …
MARGIN = 0.1
#: … and what one pass may take of it, so that a call that arrives meanwhile finds time left for its own.
SHARE = 0.5


class Allowance:
    """The time that one pass has; it begins with it."""

    def __init__(self) -> None:
        self._began_s = self._level_began_s = time.monotonic()
        self._longest_s = 0.0

    def begin_levels(self) -> None:
        """Note that the context is read: what that took is no measure of a level."""
        self._level_began_s = time.monotonic()

    def note_level(self) -> None:
        """Note that a level of the trees has been grown; the next is reckoned to take as long as the longest did."""
        now_s = time.monotonic()
        self._longest_s = max(self._longest_s, now_s - self._level_began_s)
        self._level_began_s = now_s

    def allows(self, job: EngineCall[DraftRequest]) -> bool:
        """Return whether another level of the job's tree would be in time."""
        given_s = job.deadline_s - job.arrived_s
        end_s = min(job.deadline_s - MARGIN * given_s, self._began_s + SHARE * given_s)
        return self._level_began_s + self._longest_s <= end_s


HeadCall = EngineCall[DraftRequest]

#: Long contexts of several jobs are not computed in one pass, which would be late for all of them.
MAX_PASS_ROWS = 512

log = logging.getLogger(__name__)


class HeadEngine:
    """Answers draft calls; implements `runtime.engine.calls.Engine`.

    Invariant: an answer depends on its own request alone. It reads the target's states and the committed tokens; penalties,
    bias and grammars change p, and are left to the target and to `Pruned`.
    """

    def __init__(self, feature_width: int, vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
        """feature_width: numbers of a row of features. vocab_size: of the target."""
        self.feature_width = feature_width
        self._vocab_size = vocab_size
        self._device = device
        self._dtype = dtype
        # A head that holds nothing between calls has no block to give.
        self._sequences = SequenceTable(BlockPool(0, 1), 0)

    @property
    def sequences(self) -> SequenceTable:
        """The sequences that it holds."""
        return self._sequences

    def preparation(self, request: DraftRequest) -> Callable[[], None] | None:
        """Return None: nothing is to be done before a call."""
        return None

    @torch.inference_mode()
    def advance(self, jobs: list[HeadCall]) -> list[HeadCall]:
        """Draft for as many jobs as one pass takes, level by level, and answer them; return the others."""
        now, later = _share(jobs)
        opened = [job for job in now if self._opens(job)]
        for job, tree in zip(opened, self.draft(opened) if opened else [], strict=True):
            job.reply(DraftResponse(tree, cached_len=self.cached_len(job)))
        return later

    def _opens(self, job: HeadCall) -> bool:
        try:
            self._check(job)
            room = min(job.request.max_nodes, job.request.max_depth)
            reason_not_to = self.open(job) if room > 0 else "there is no room for a node"
        except ServingError as error:
            job.reply(error)
            return False
        if reason_not_to:
            log.debug("sequence %d is not drafted for: %s", job.sequence_id, reason_not_to)
            job.reply(DraftResponse(TokenTree.bare(), cached_len=self.cached_len(job)))
        return not reason_not_to

    def _check(self, job: HeadCall) -> None:
        """Refuse what would harm other jobs: foreign ids, and numbers that are none, which a cache keeps."""
        ids, features = job.delta.context_ids, job.request.head.features
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise RequestError(f"context_ids has an id outside 0..{self._vocab_size - 1}")
        if features is None:
            return
        if features.shape[1] != self.feature_width:
            raise EngineError(f"features have {features.shape[1]} numbers a row, the head reads {self.feature_width}")
        if not np.isfinite(features).all():
            raise EngineError("features have numbers that are not finite")

    def open(self, job: HeadCall) -> str:
        """Make ready for a job; return why it cannot be drafted for, or ""; raises ServingError."""
        return "" if newest_is_there(job) else "the newest state is missing"

    def draft(self, jobs: list[HeadCall]) -> list[TokenTree]:
        """Return each job's tree."""
        raise NotImplementedError

    def cached_len(self, job: HeadCall) -> int:
        """Return the first position whose state the head lacks; one that keeps none lacks the newest alone."""
        return job.delta.prefix_len - 1

    def features_of(self, job: HeadCall, first: int) -> Tensor:
        """Return the states of the positions `first` … newest, (r, width)."""
        head = job.request.head
        assert head.features is not None
        return torch.from_numpy(head.features[first - head.features_start :].copy()).to(self._device, self._dtype)


def grow(jobs: Sequence[HeadCall], growths: Sequence[Growth], logits: Tensor, ids: Tensor | None) -> None:
    """Give every growth the children of its frontier; logits: (all frontiers, V), job by job; ids: as in `rank`."""
    owners = [(job, growth.depth) for job, growth in zip(jobs, growths, strict=True) for _ in growth.frontier]
    ranked = ranked_children(owners, growths, logits, ids)
    start = 0
    for growth in growths:
        rows, start = slice(start, start + len(growth.frontier)), start + len(growth.frontier)
        growth.take(ranked[0][rows, : growth.fan_out], ranked[1][rows, : growth.fan_out])


def ranked_children(
    owners: Sequence[tuple[HeadCall, int]], growths: Sequence[Growth], logits: Tensor, ids: Tensor | None = None
) -> tuple[IdArray, FloatArray]:
    """Return the likeliest children of nodes, ids and scores (n, k); owners: whose each node is, and its depth.

    A child of a node at depth t is the token at position prefix_len + t.
    """
    positions = [job.delta.prefix_len + depth for job, depth in owners]
    samplings = [job.request.sampling for job, _ in owners]
    found = rank(logits, positions, samplings, max(growth.fan_out for growth in growths), ids)
    return found.ids.int().cpu().numpy(), found.scores.cpu().numpy()


def _share(jobs: list[HeadCall]) -> tuple[list[HeadCall], list[HeadCall]]:
    """Return the jobs of this pass and the others: rows of features up to MAX_PASS_ROWS, but one job at least."""
    num_rows = np.cumsum(
        [len(job.request.head.features) if job.request.head.features is not None else 0 for job in jobs]
    )
    count = max(int((num_rows <= MAX_PASS_ROWS).sum()), 1)
    return jobs[:count], jobs[count:]


def newest_is_there(job: HeadCall) -> bool:
    """Return whether the state came along whose LM-head pick became the root: that of position prefix_len − 2."""
    head = job.request.head
    if head.features is None or not len(head.features):
        return False
    return head.features_start + len(head.features) == job.delta.prefix_len - 1


def growth_of(job: HeadCall, max_depth: int, own_choices: TokenTree | None = None, beams: bool = False) -> Growth:
    """Return the empty tree of a job: of its own shape, else dynamic if it names a width, else the head's."""
    request, choices = job.request, job.request.head.choices
    if not choices.num_nodes and not request.head.width and own_choices:
        choices = own_choices
    if not choices.num_nodes:
        return Dynamic(max(request.head.width, 1), request.max_nodes, max_depth, beams)
    return Static(choices.only(choices.within(request.max_nodes, max_depth)))
