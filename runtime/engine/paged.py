"""A model with its cache and sequences, and the skeleton that the target engine and the draft engine share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from native.chains import NativeChain
from native.sampling import sampler
from orchestrator.core.accept import AcceptedPath
from orchestrator.core.errors import RequestError, ServingError
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import MAX_FEATURE_ROWS, Acceptance, HiddenStates, StepOptions
from runtime.engine.calls import EngineCall, Progress, Request
from runtime.engine.kv.batch import MAX_PASS_ROWS, MAX_TREE_NODES, Pass, Segment
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.cache import KVCache
from runtime.engine.kv.groups import STEP_TOKENS
from runtime.engine.kv.sequences import CachedSequence, SequenceTable
from runtime.engine.sampling.logits_processors import LogitsProcessors, processors_for
from runtime.engine.staging import stage
from runtime.models.native.decoding import DecodedSteps, Decoding, Draft, steps_of
from runtime.models.native.model import NativeModel

#: Tokens of long contexts in a pass on a CPU.
CPU_PASS_TOKENS = 256


class Model(Protocol):
    """The forward pass of a model, as an engine uses it.

    kernels: what computes it, torch or native. has_windows: some layers attend to a sliding window only.
    """

    kernels: str
    vocab_size: int
    max_positions: int
    has_windows: bool
    dtype: torch.dtype
    device: torch.device

    def prepare(self) -> None:
        """Do the work that every thread must do once; called on the thread that will call `forward`."""

    def new_cache(self, memory_mb: int, block_tokens: int) -> KVCache:
        """Return an empty cache; the model may choose another block size."""

    def forward(self, batch: Pass[Segment], cache: Any) -> Tensor:
        """Compute a pass; return the logits after every root and node, (rows, V)."""

    def feature_columns(self, wanted: HiddenStates) -> slice:
        """Return the columns of these hidden states in the cache; an empty slice unless all of them are kept."""


class FeatureRows(NamedTuple):
    """Hidden states, (r, width) float32, of consecutive positions from the first on; None if they are not wanted."""

    states: np.ndarray | None
    start: int


class PagedModel:
    """Opens sequences and runs passes over their segments.

    max_pass_tokens: maximum tokens of long contexts in one pass. Longer contexts are computed in parts, so that they
    delay other sequences by no more than one part. share: sequences with a common prefix share its blocks.
    """

    def __init__(
        self,
        model: Model,
        memory_mb: int,
        block_tokens: int,
        max_pass_tokens: int = CPU_PASS_TOKENS,
        share: bool = True,
    ) -> None:
        self.model = model
        self.max_pass_tokens = max_pass_tokens
        self.cache = model.new_cache(memory_mb, block_tokens)
        pool = BlockPool(self.cache.num_blocks, self.cache.block_tokens)
        self.sequences = SequenceTable(pool, model.max_positions, share)

    def check_ids(self, call: EngineCall) -> None:
        """Raise RequestError for a context that the model cannot read."""
        ids = call.delta.context_ids
        if len(ids) and (ids.min() < 0 or ids.max() >= self.model.vocab_size):
            raise RequestError(f"context_ids has an id outside 0..{self.model.vocab_size - 1}")

    def open(self, call: EngineCall, num_drafts: int, max_depth: int) -> None:
        """Open a call's sequence, with slots for its drafts; raises ServingError if that is impossible."""
        self.check_ids(call)
        call.sequence = self.sequences.open(call.delta, num_drafts, max_depth)

    def plan(
        self, calls: list[EngineCall[Request]], num_nodes: Callable[[EngineCall[Request]], int]
    ) -> list[tuple[EngineCall[Request], Segment]]:
        """Return the segments of the next pass: all uncomputed tokens of each sequence, or the next part of them.

        num_nodes: returns the number of nodes of a call's tree. The first call that has anything to compute always
        takes part, so that each call gets its turn.
        """
        tokens_left, nodes_left, rows_left = self.max_pass_tokens, MAX_TREE_NODES, MAX_PASS_ROWS
        planned: list[tuple[EngineCall[Request], Segment]] = []
        for call in calls:
            sequence, nodes = call.opened, num_nodes(call)
            size = len(sequence.ids) - sequence.num_computed
            is_long, is_large = size > STEP_TOKENS, nodes > STEP_TOKENS
            size = min(size, tokens_left) if is_long else size
            is_too_large = size + nodes > rows_left or (is_large and nodes > nodes_left)
            if not size or (is_too_large and planned):
                continue
            tokens_left -= size if is_long else 0
            nodes_left -= nodes if is_large else 0
            rows_left -= size + nodes
            first = sequence.num_computed
            planned.append((call, Segment(sequence, first, first + size)))
        return planned

    def forward(self, segments: list[Segment]) -> Tensor:
        """Run a pass and note what is computed; return the logits of every segment's root and nodes, (rows, V)."""
        batch = Pass(segments, self.model.device, self.model.dtype)
        logits = self.model.forward(batch, self.cache)
        self._note_computed(segments)
        return logits

    def draft_chains(self, segments: list[Segment], chains: list[NativeChain]) -> list[list[int]]:
        """Run a pass over contexts and draft the chains after them, in native code; return the tokens of each chain."""
        assert isinstance(self.model, NativeModel)
        batch = Pass(segments, self.model.device, self.model.dtype)
        drafted = self.model.draft_chains(batch, self.cache, chains)
        self._note_computed(segments)
        return drafted

    def decode(self, segments: list[Segment], drafts: Sequence[Draft], decoding: Decoding) -> list[DecodedSteps]:
        """Run a burst in native code, and commit its tokens; return the steps of each segment.

        segments: each with one uncomputed token. drafts: the drafts of the first steps.
        """
        assert isinstance(self.model, NativeModel)
        for segment, draft in zip(segments, drafts, strict=True):
            segment.tree = draft.tree
        decoded = self.model.decode(Pass(segments, self.model.device, self.model.dtype), self.cache, decoding)
        by_segment = steps_of(decoded, drafts)
        for segment, each in zip(segments, by_segment, strict=True):
            tokens = each.tokens
            segment.sequence.context.commit(tokens)
            segment.last += len(tokens) - 1  # the last one is the next step's root
        self._note_computed(segments)
        return by_segment

    def commit(self, steps: Sequence[tuple[CachedSequence, TokenTree, AcceptedPath]]) -> None:
        """Keep only the KV rows of the accepted paths, moving them to the slots right after the old roots'."""
        moves = [
            (sequence.slot(len(sequence.ids) + node - 1), sequence.slot(len(sequence.ids) + level))
            for sequence, _, accepted in steps
            for level, node in enumerate(accepted.path)
            if node != level + 1
        ]
        if moves:
            self.cache.move(*map(list, zip(*moves, strict=True)))
        for sequence, tree, accepted in steps:
            sequence.num_computed = len(sequence.ids) + len(accepted.path)
            sequence.context.commit(Acceptance(*accepted).tokens(tree))
            sequence.publish(len(sequence.ids))

    def features(self, requests: Sequence[tuple[CachedSequence, StepOptions]]) -> list[FeatureRows]:
        """Return the newest hidden states that each request wants, from options.features_from on, in one copy.

        They are at most MAX_FEATURE_ROWS, and none if features_from is beyond the computed tokens.
        """
        wanted: dict[int, tuple[slice, range]] = {}
        for number, (sequence, options) in enumerate(requests):
            columns = self.model.feature_columns(options.hidden_states)
            if options.features_from is not None and columns.start < columns.stop:
                end = sequence.num_computed
                start = max(options.features_from, end - MAX_FEATURE_ROWS, 0)
                wanted[number] = columns, range(start, max(start, end))
        result = [FeatureRows(None, 0)] * len(requests)
        if not wanted:
            return result
        slots = [requests[number][0].slot(place) for number, (_, places) in wanted.items() for place in places]
        (index,) = stage([np.array(slots, np.int64)], self.model.device)
        left, right = min(own.start for own, _ in wanted.values()), max(own.stop for own, _ in wanted.values())
        states = self.cache.features[:, left:right][index].cpu().float().numpy()
        stops = np.cumsum([len(places) for _, places in wanted.values()])
        for (number, (columns, places)), rows in zip(wanted.items(), np.split(states, stops[:-1]), strict=True):
            own = rows[:, columns.start - left : columns.stop - left]
            result[number] = FeatureRows(np.ascontiguousarray(own), places.start)
        return result

    def _note_computed(self, segments: list[Segment]) -> None:
        now_s = time.monotonic()
        for segment in segments:
            segment.sequence.num_computed = segment.last
            segment.sequence.last_used_s = now_s


class PagedEngine(Generic[Request]):
    """An engine over a paged model; implements `runtime.engine.calls.Engine`."""

    def __init__(self, paged: PagedModel) -> None:
        self.paged = paged
        self.sequences = paged.sequences
        self.progress = Progress()
        sampler()  # if it has to be compiled, then now and not in the first pass

    @property
    def kernels(self) -> str:
        """What computes the passes: torch or native."""
        return self.paged.model.kernels

    def advance(self, calls: list[EngineCall[Request]]) -> list[EngineCall[Request]]:
        """Run one pass, or several for BurstRequest; answer the calls that are complete, and return the others."""
        self._open_all(calls)
        opened = [call for call in calls if call.sequence and not call.answered]
        planned = self.paged.plan(opened, self._num_nodes)
        if planned:
            self._run(planned)
        return [call for call in calls if not call.answered]

    def _open_all(self, calls: list[EngineCall[Request]]) -> None:
        """Open the sequences of new calls; refuse the calls for which that is impossible."""
        for call in calls:
            if call.sequence is None:
                try:
                    self._open(call)
                except ServingError as error:
                    call.reply(error)

    def _num_nodes(self, call: EngineCall[Request]) -> int:
        """Return the nodes of the tree that a call's pass verifies."""
        return 0

    def _open(self, call: EngineCall[Request]) -> None:
        """Open the sequence of a new call, answer the call, or raise ServingError."""
        raise NotImplementedError

    def _run(self, planned: list[tuple[EngineCall[Request], Segment]]) -> None:
        """Run and count a pass over these segments, and answer the calls that it completes."""
        raise NotImplementedError

    def _processors(self, call: EngineCall[Request]) -> LogitsProcessors | None:
        """Return the logits processors of a call's sequence, which live from step to step."""
        sequence, request = call.opened, call.request
        sequence.logits_processors = processors_for(request.sampling, call.delta.prompt_len, sequence.logits_processors)
        return sequence.logits_processors
