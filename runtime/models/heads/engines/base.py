"""What the engines of all heads share: checks, the time budget, and trees that grow level by level in one pass."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from orchestrator.core.arrays import Features
from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, RequestError, ServingError
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse
from runtime.engine.calls import Progress
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.sequences import SequenceTable
from runtime.engine.staging import staged
from runtime.models.heads.engines.drafts import DraftInProgress, HeadCall, TimeBudget, call_after, has_newest_features
from runtime.models.heads.engines.levels import Level, add_level, check_draws
from runtime.models.heads.engines.trees import DynamicTree, GrowingTree, StaticTree, in_sibling_order
from runtime.models.heads.sharpness import Sharpness
from runtime.models.native.draft_calls import NativeDraft
from runtime.models.native.drafters import ContinuedDraft, NativeDrafter
from runtime.models.native.heads import NativeHead

#: Calls share one pass up to this many context rows in total; a longer pass would make all of them late.
MAX_PASS_ROWS = 512

logger = logging.getLogger(__name__)


class HeadEngine(ABC):
    """Answers draft calls; implements `runtime.engine.calls.Engine`.

    Invariant: an answer depends only on its own request: on the target's states, the committed tokens and the sampling
    parameters. Penalties, bias and grammars change p; they are left to the target and to `Guarded`.

    default_choices: the static tree for a request that names no shape. draft_ids: (V_d,) int64, the target's ids of a
    draft vocabulary; None if the vocabulary is the target's.
    """

    default_choices: TokenTree | None = None
    draft_ids: Tensor | None = None
    beam_search = False

    def __init__(
        self,
        feature_width: int,
        vocab_size: int,
        weight: Tensor,
        sharpness: Sharpness,
        native: NativeHead | None = None,
    ) -> None:
        """feature_width: numbers per row of features. vocab_size: the target's. weight: any tensor of the head.

        sharpness: the head's own. native: the head in native code, which then drafts instead of the torch module.
        """
        self.native = native
        self._sharpness = sharpness
        self.feature_width = feature_width
        self._vocab_size = vocab_size
        self._device, self._dtype = weight.device, weight.dtype
        # A head that keeps nothing between calls holds no blocks.
        self._sequences = SequenceTable(BlockPool(0, 1), 0)
        self.progress = Progress()

    @property
    def kernels(self) -> str:
        """What computes the drafts: torch or native."""
        return "native" if self.native else "torch"

    @property
    def sequences(self) -> SequenceTable:
        """The sequences that the engine holds."""
        return self._sequences

    @torch.inference_mode()
    def advance(self, calls: list[HeadCall]) -> list[HeadCall]:
        """Draft for as many calls as fit into a pass, answer them, and return the others."""
        num_rows = np.cumsum([len(rows) if (rows := call.request.head.features) is not None else 0 for call in calls])
        count = max(int((num_rows <= MAX_PASS_ROWS).sum()), 1)
        opened = [call for call in calls[:count] if self._opens(call)]
        if not opened:
            return calls[count:]
        drafts = self._draft(opened)
        self.progress.count(len(opened))
        for call, drafted in zip(opened, drafts, strict=True):
            call.reply(drafted._replace(cached_len=self.cached_len(call)))
        return calls[count:]

    def _opens(self, call: HeadCall) -> bool:
        """Check and open a call; return False if it has been answered, with an error or an empty tree."""
        try:
            self._check(call)
            has_room = min(call.request.max_nodes, call.request.max_depth) > 0
            obstacle = self.open(call) if has_room else "there is no room for a node"
        except ServingError as error:
            call.reply(error)
            return False
        if obstacle:
            logger.debug("no draft for sequence %d: %s", call.sequence_id, obstacle)
            call.reply(DraftResponse(TokenTree.bare(), cached_len=self.cached_len(call)))
        return not obstacle

    def _check(self, call: HeadCall) -> None:
        """Refuse ids and features that would harm other calls: in a cache, NaN or infinity does so even if masked."""
        check_draws(call.request)
        ids, features = call.delta.context_ids, call.request.head.features
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise RequestError(f"context_ids has an id outside 0..{self._vocab_size - 1}")
        if features is None:
            return
        if features.shape[1] != self.feature_width:
            raise EngineError(f"features have {features.shape[1]} numbers a row, the head reads {self.feature_width}")
        if not np.isfinite(features).all():
            raise EngineError("features have numbers that are not finite")

    def _draft(self, calls: list[HeadCall]) -> list[DraftResponse]:
        budget = TimeBudget()
        if self.native is not None:
            return self.draft_natively(self.native, calls, budget)
        drafts = self.begin(calls)
        budget.begin_levels()
        live = drafts
        while live:
            logits = self.logits(live).split([self.num_logit_rows(draft) for draft in live])
            levels = [Level(draft.call, draft, rows) for draft, rows in zip(live, logits, strict=True)]
            add_level(levels, self._sharpness, self.draft_ids)
            budget.note_level()
            live = [draft for draft in live if draft.tree.frontier and budget.allows(draft.call)]
            if live and (states := self.next_states(live)) is not None:
                rows = iter(states)
                for draft in live:
                    draft.states |= {node: next(rows) for node in draft.tree.frontier}
        return [draft.drafted() for draft in drafts]

    def draft_natively(self, native: NativeHead, calls: list[HeadCall], budget: TimeBudget) -> list[DraftResponse]:
        """Return the tree of each call; a head without a cache reads only the newest state and the root."""
        return native.draft(
            [
                self.native_draft(call, budget, [int(call.delta.context_ids[-1])], call.delta.prefix_len - 2)
                for call in calls
            ]
        )

    def native_draft(self, call: HeadCall, budget: TimeBudget, tokens: list[int], first: int) -> NativeDraft:
        """Return native code's input for a call. tokens: those of the rows to read. first: the first row's position."""
        return self._native_input(call, budget, self.choices_of(call), tokens, call.request.head.features_since(first))

    def _native_input(
        self, call: HeadCall, budget: TimeBudget, choices: TokenTree, tokens: list[int], features: Features
    ) -> NativeDraft:
        request = call.request
        return NativeDraft(
            sampling=request.sampling,
            position=call.delta.prefix_len,
            max_nodes=request.max_nodes,
            max_depth=self.max_depth(call),
            width=max(request.head.width, 1),
            choices=choices,
            tokens=tokens,
            features=features,
            max_s=budget.limit_s(call),
            min_score=request.head.min_score,
            draws=request.head.draws,
            sharpness=self._sharpness.of(request.head, request.sampling),
        )

    def is_native(self, request: DraftRequest) -> bool:
        """Return whether native code can make the next drafts by itself, between the steps of a burst."""
        return self.native is not None and not request.head.draws

    def continued(self, request: DraftRequest, context: Context, num_ahead: int) -> ContinuedDraft | None:
        """Return how native code can continue drafting after a context; None: the head has not read all of it.

        request: an earlier call. num_ahead: maximum tokens that the burst may commit.
        """
        return ContinuedDraft(self.draft_after(request, context), len(context))

    def draft_after(self, request: DraftRequest, context: Context) -> NativeDraft:
        """Return native code's input for the drafts after a context; it finds their rows and limits itself."""
        no_features = np.empty((0, 0), np.float32)
        return self._native_input(
            call_after(request, context), TimeBudget(), self._choices(request), [context.root], no_features
        )

    def burst_drafter(self, drafts: Sequence[NativeDraft]) -> NativeDrafter:
        """Return what native code needs to call the head in a burst."""
        assert self.native is not None
        return self.native.burst_drafter(drafts)

    def open(self, call: HeadCall) -> str:
        """Prepare for a call; return why it cannot get a draft, or "" if it can; raises ServingError."""
        return "" if has_newest_features(call) else "the newest state is missing"

    @abstractmethod
    def begin(self, calls: list[HeadCall]) -> list[DraftInProgress]:
        """Read each call's context, and return its tree with the root's state."""

    @abstractmethod
    def logits(self, drafts: list[DraftInProgress]) -> Tensor:
        """Return the logits of the children of all frontiers, (sum of num_logit_rows, V or V_d), draft by draft."""

    def num_logit_rows(self, draft: DraftInProgress) -> int:
        """Return the number of a draft's rows of logits: one per candidate of its frontier, or one for all of them."""
        return len(draft.tree.frontier)

    def next_states(self, drafts: list[DraftInProgress]) -> Tensor | None:
        """Return the states of all frontiers' candidates, (n, …), draft by draft; None if the head reads only roots."""
        return None

    def cached_len(self, call: HeadCall) -> int:
        """Return the first position whose features the head lacks; a head without a cache needs only the newest."""
        return call.delta.prefix_len - 1

    def max_depth(self, call: HeadCall) -> int:
        """Return the maximum number of levels of a call's tree."""
        return call.request.max_depth

    def choices_of(self, call: HeadCall) -> TokenTree:
        """Return a call's static tree, cut to its limits; bare for a dynamic tree."""
        choices = self._choices(call.request)
        if not choices.num_nodes:
            return choices
        choices = choices.only(choices.within(call.request.max_nodes, self.max_depth(call)))
        return in_sibling_order(choices) if call.request.head.draws else choices

    def _choices(self, request: DraftRequest) -> TokenTree:
        """Return a request's static tree, or the head's if the request has no shape; bare for a dynamic tree."""
        choices = request.head.choices
        if not choices.num_nodes and not request.head.width and self.default_choices:
            return self.default_choices
        return choices

    def new_tree(self, call: HeadCall) -> GrowingTree:
        """Return an empty tree of the call's shape."""
        choices, request = self.choices_of(call), call.request
        if choices.num_nodes:
            return StaticTree(choices, request.head.min_score, request.head.draws)
        width, depth = max(request.head.width, 1), self.max_depth(call)
        # A beam search drops tokens by their values; sampled tokens must not be dropped for that reason.
        beam_search = self.beam_search and not request.head.draws
        return DynamicTree(width, request.max_nodes, depth, beam_search, request.head.min_score)

    def on_device(self, features: Sequence[Features]) -> Tensor:
        """Return rows of features one after another, (r, width), on the device and in the dtype of the head."""
        return staged(np.concatenate(features, dtype=np.float32), self._device).to(self._dtype)

    def newest_features(self, calls: list[HeadCall]) -> Tensor:
        """Return the features of each call's newest position, (calls, width)."""
        return self.on_device([call.request.head.features_since(call.delta.prefix_len - 2) for call in calls])
