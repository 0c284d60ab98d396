"""The draft engine: a small language model that drafts chains or trees, under `coupled` with the target's own noise."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from native.chains import NativeChain
from native.draws import sample_draft
from orchestrator.core.context import Context
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.sampling_params import Rule
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse
from runtime.engine.calls import DraftedChain, DraftedTree, EngineCall
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedEngine, PagedModel
from runtime.engine.sampling import served
from runtime.engine.sampling.changes import Changes, processed
from runtime.engine.sampling.drafts import candidates
from runtime.engine.staging import staged
from runtime.models.heads.engines.levels import Level, add_level, check_draws
from runtime.models.heads.engines.ranking import rank
from runtime.models.heads.engines.trees import DynamicTree
from runtime.models.heads.sharpness import AS_SURE_AS_Q, Sharpness
from runtime.models.native.draft_calls import NativeDraft
from runtime.models.native.drafters import ContinuedDraft, NativeDrafter
from runtime.models.native.model import NativeModel

#: Fraction of a call's time after which its draft gets no more tokens; the rest is for the current pass.
DRAFT_SHARE = 0.5

DraftCall = EngineCall[DraftRequest]


class DraftEngine(PagedEngine[DraftRequest]):
    """Answers draft calls: each pass adds a token to the chain, or a level to the tree, of every call that it has read.

    In native code, one call computes a pass and then whole chains.

    The ids of a sequence with a chain are the committed context followed by the tokens drafted so far, so the KV rows
    of drafts that the target accepts are already there at the next call. A tree grows as those of heads do: each of its
    passes is a tree pass like the target's, over the root and the paths to the nodes that the level expands. These rows
    are in the slots from the root's on, where the next call begins again.
    Invariant: token i of a chain is argmax(log q + noise) at position prefix_len + i. Under `coupled` it is the noise
    that the target adds to log p there: the closer q is to p, the more often both choose the same token. Under the
    other rules the noise is the drafter's own, and q is part of the answer. A chain that takes too long is cut short.
    sharpness: the draft model's own, for calls that set 0.
    """

    def __init__(self, paged: PagedModel, sharpness: Sharpness = AS_SURE_AS_Q) -> None:
        super().__init__(paged)
        self._sharpness = sharpness

    def _open(self, call: DraftCall) -> None:
        length = self._length(call)
        if length < 1:
            call.reply(DraftResponse(TokenTree.bare()))
            return
        check_draws(call.request)
        call.chain, call.tree, head = DraftedChain(), None, call.request.head
        if not head.width:
            self.paged.open(call, length, length)
            return
        max_nodes = call.request.max_nodes
        call.tree = DraftedTree(DynamicTree(head.width, max_nodes, length, min_score=head.min_score))
        self.paged.open(call, min(max_nodes, head.width * (length - 1)), length)

    def _num_nodes(self, call: DraftCall) -> int:
        return call.tree.tree.paths_to_frontier()[0].num_nodes if call.tree else 0

    def is_native(self, request: DraftRequest) -> bool:
        """Return whether native code can draft for a request: a whole chain without q and without logits processors."""
        sampling = request.sampling
        is_coupled = sampling.rule is Rule.COUPLED and not sampling.needs_logits_processors
        return isinstance(self.paged.model, NativeModel) and is_coupled and not request.head.width

    def continued(self, request: DraftRequest, context: Context, num_ahead: int) -> ContinuedDraft | None:
        """Return how native code can continue drafting after a context; None: the draft model has not read all of it.

        request: an earlier call. num_ahead: maximum tokens that the burst may commit.
        """
        sequence = self.sequences.find(request.delta.sequence_id, context)
        if sequence is None or sequence.num_computed < len(context):
            return None
        length = request.max_depth  # in a union, the draft model's share of the nodes is another one at each step
        sequence.reserve_up_to(len(context) + num_ahead + length)
        draft = NativeDraft(
            sampling=request.sampling,
            position=len(context),
            max_nodes=length,
            max_depth=length,
            width=1,
            choices=TokenTree.bare(),
            tokens=[context.root],
            features=np.empty((0, 0), np.float32),
            max_s=math.inf,
            blocks=sequence.blocks,
            min_score=request.head.min_score,
            sharpness=self._sharpness.of(request.head, request.sampling),
        )
        return ContinuedDraft(draft, sequence.num_computed, sequence)

    def burst_drafter(self, drafts: Sequence[NativeDraft]) -> NativeDrafter:
        """Return what native code needs to call the draft model in a burst."""
        assert isinstance(self.paged.model, NativeModel)
        return self.paged.model.burst_drafter(drafts, self.paged.cache)

    def _length(self, call: DraftCall) -> int:
        """Return how long a path to draft: as long as requested, within the draft model's context length."""
        room = self.paged.model.max_positions - call.delta.prefix_len
        return min(call.request.max_nodes, call.request.max_depth, room)

    def _run(self, planned: list[tuple[DraftCall, Segment]]) -> None:
        self.progress.count(len(planned))
        segments = [segment for _, segment in planned]
        ready = [row for row, (_, s) in enumerate(planned) if s.last == len(s.sequence.ids)]
        if ready and all(self.is_native(planned[row][0].request) for row in ready):
            self._draft_chains(segments, {row: planned[row][0] for row in ready})
            return
        frontiers = {}
        for row in ready:
            if growing := planned[row][0].tree:
                segments[row].tree, frontiers[row] = growing.tree.paths_to_frontier()
        logits = self.paged.forward(segments)
        if not ready:
            return
        parts = logits.split([1 + each.tree.num_nodes for each in segments])
        changes = [self._changes(planned[row][0], segments[row].tree) for row in ready]
        found = dict(zip(ready, processed([parts[row] for row in ready], changes), strict=True))
        if chains := {planned[row][0]: own.to(logits.dtype) for row, own in found.items() if row not in frontiers}:
            self._extend_chains(chains)
        self._extend_trees(
            {planned[row][0]: found[row][staged(own, logits.device)].to(logits.dtype) for row, own in frontiers.items()}
        )

    def _extend_chains(self, found: dict[DraftCall, Tensor]) -> None:
        """Add a token to each chain, and answer the calls whose chain ends. found: logits of each call, (1, V)."""
        calls = list(found)
        for call, token in zip(calls, _next_tokens(calls, torch.cat([*found.values()]), self._sharpness), strict=True):
            call.opened.publish(call.delta.prefix_len)
            call.opened.context.commit([token])
            is_full = len(call.opened.ids) - call.delta.prefix_len == self._length(call)
            if is_full or call.chain.score < call.request.head.min_score or _has_used_its_time(call):
                call.reply(_drafted(call))

    def _extend_trees(self, found: dict[DraftCall, Tensor]) -> None:
        """Add a level to each tree, and answer the calls whose tree is complete.

        found: logits after the frontier of each call's tree, (frontier, V).
        """
        levels = [Level(call, call.tree, rows) for call, rows in found.items() if call.tree]
        add_level(levels, self._sharpness)
        for call, drafted, _ in levels:
            if drafted.tree.frontier and not _has_used_its_time(call):
                call.opened.num_computed = call.delta.prefix_len - 1  # the next pass begins with the root again
                continue
            call.opened.publish(call.delta.prefix_len)
            call.reply(drafted.drafted()._replace(cached_len=call.delta.prefix_len))

    def _draft_chains(self, segments: list[Segment], ready: dict[int, DraftCall]) -> None:
        """Run a pass, and draft the rest of these calls' chains. ready: index of a segment → its call."""
        chains = []
        for row, call in ready.items():
            num_drafted = len(call.opened.ids) - call.delta.prefix_len
            left, head = self._length(call) - num_drafted, call.request.head
            sharpness = self._sharpness.of(head, call.request.sampling)
            chains.append(NativeChain(row, left, call.request.sampling, head.min_score, sharpness))
        for call, tokens in zip(ready.values(), self.paged.draft_chains(segments, chains), strict=True):
            call.opened.context.commit(tokens)
            call.opened.num_computed = len(call.opened.ids) - 1
            call.opened.publish(call.delta.prefix_len)
            call.reply(_drafted(call))

    def _changes(self, call: DraftCall, tree: TokenTree) -> Changes | None:
        """Return what the request's processors change in the logits of its rows; drafted tokens count as output."""
        processors, context, prefix_len = self._processors(call), call.opened.context, call.delta.prefix_len
        paths = tree.paths if call.tree else [context.ids[prefix_len:]]
        return processors.changes(context, prefix_len, paths) if processors else None


def _has_used_its_time(call: DraftCall) -> bool:
    """Return whether a draft should end now. If it were late as a whole, its tokens would decide whether it is used."""
    return time.monotonic() - call.arrived_s >= DRAFT_SHARE * (call.deadline_s - call.arrived_s)


def _drafted(call: DraftCall) -> DraftResponse:
    """Return the answer to a call whose chain is complete."""
    prefix_len = call.delta.prefix_len
    cached_len = min(call.opened.num_computed, prefix_len)
    return DraftResponse(TokenTree.chain(call.opened.ids[prefix_len:]), tuple(call.chain.q), cached_len)


def _next_tokens(calls: list[DraftCall], logits: Tensor, sharpness: Sharpness) -> list[int]:
    """Return the next token of each chain, and note its score; if the rule is not `coupled`, also its q.

    logits: (len(calls), V). sharpness: for calls that set 0.
    """
    positions, samplings = [len(call.opened.ids) for call in calls], [call.request.sampling for call in calls]
    tokens: dict[int, int] = {}
    coupled = [row for row, sampling in enumerate(samplings) if sampling.rule is Rule.COUPLED]
    if coupled:
        own = logits[staged(coupled, logits.device)]
        found = served.target_tokens(own, [positions[row] for row in coupled], [samplings[row] for row in coupled])
        tokens |= zip(coupled, found, strict=True)
        if any(calls[row].request.head.min_prob for row in coupled):
            best = rank(
                own,
                [positions[row] for row in coupled],
                [samplings[row] for row in coupled],
                k=1,
                sharpness=[sharpness.of(calls[row].request.head, samplings[row]) for row in coupled],
            )
            for row, (score,) in zip(coupled, best.scores.tolist(), strict=True):
                calls[row].chain.score += score
    if others := [row for row in range(len(calls)) if row not in tokens]:
        sampled_from = candidates(logits[staged(others, logits.device)], [samplings[row] for row in others])
        for row, q in zip(others, sampled_from, strict=True):
            calls[row].chain.q.append(q)
            tokens[row] = sample_draft(q, positions[row], samplings[row], calls[row].delta.prefix_len)
            calls[row].chain.score += float(np.log(q.probs[np.searchsorted(q.ids, tokens[row])]))
    return [tokens[row] for row in range(len(calls))]
