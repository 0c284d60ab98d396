"""A model, its cache and its sequences together: what the target and the draft engine both stand on."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from orchestrator.core.errors import RequestError, ServingError
from orchestrator.core.types import HiddenStates
from orchestrator.wire.context import Delta
from runtime.engine.calls import EngineCall
from runtime.kv.batch import Pass, Segment
from runtime.kv.blocks import BlockPool
from runtime.kv.cache import KVCache
from runtime.kv.sequences import SequenceTable


class Columns(Protocol):
    """Where hidden states stand among those that a cache keeps."""

    def columns(self, wanted: HiddenStates) -> slice:
        """Return where the wanted states stand; none where not all of them are kept."""


class Model(Protocol):
    """The forward pass of a model, as an engine sees it."""

    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device

    @property
    def taps(self) -> Columns:
        """Which hidden states it keeps."""

    def prepare(self) -> None:
        """Make ready what is made once per thread; called on the thread that will call `forward`."""

    def new_cache(self, memory_mb: int, block_tokens: int) -> KVCache:
        """Return empty blocks; their size is a wish."""

    def forward(self, batch: Pass, cache: Any) -> Tensor:
        """Compute a row of segments; returns logits (rows, V) of every root and node."""


# Up to this many tokens a segment is a decoding step and goes into every pass, whatever else does.
STEP_TOKENS = 32


class PagedModel:
    """Opens sequences and runs passes over their segments.

    max_pass_tokens: long contexts are computed in parts, of this many tokens a pass in all, so that
    they never hold up the others for longer than one part takes.
    """

    def __init__(
        self,
        model: Model,
        memory_mb: int,
        block_tokens: int,
        max_pass_tokens: int = 256,
        share: bool = True,
    ) -> None:
        self.model = model
        self.max_pass_tokens = max_pass_tokens
        self.cache = model.new_cache(memory_mb, block_tokens)
        self.pool = BlockPool(self.cache.num_blocks, self.cache.block_tokens)
        self.sequences = SequenceTable(self.pool, model.max_positions, share)

    def open(self, job: EngineCall, num_drafts: int, max_depth: int) -> bool:
        """Give a job its sequence, with slots for its drafts; False when it was answered with an error."""
        try:
            self._check_ids(job.delta)
            job.sequence = self.sequences.open(job.delta, num_drafts, max_depth)
        except ServingError as error:
            job.reply(error)
            return False
        return True

    def _check_ids(self, delta: Delta) -> None:
        ids = delta.context_ids
        if len(ids) and (ids.min() < 0 or ids.max() >= self.model.vocab_size):
            raise RequestError(f"context_ids has an id outside 0..{self.model.vocab_size - 1}")

    def plan(self, jobs: list[EngineCall]) -> list[tuple[EngineCall, Segment]]:
        """Return each job's share of the next pass: all that its sequence lacks, or the next part of it."""
        left = self.max_pass_tokens
        shares: list[tuple[EngineCall, Segment]] = []
        for job in jobs:
            sequence = job.opened
            size = len(sequence.ids) - sequence.num_computed
            if size > STEP_TOKENS:
                size = min(size, left)
                left -= size
            if size:
                first = sequence.num_computed
                shares.append((job, Segment(sequence, first, first + size)))
        return shares

    def forward(self, segments: list[Segment]) -> Tensor:
        """Run one pass and note what is computed.

        Returns the logits of every segment's last context token and nodes, (rows, V).
        """
        batch = Pass(segments, self.model.device, self.model.dtype)
        logits = self.model.forward(batch, self.cache)
        now_s = time.monotonic()
        for segment in segments:
            segment.sequence.num_computed = segment.last
            segment.sequence.last_used_s = now_s
        return logits
