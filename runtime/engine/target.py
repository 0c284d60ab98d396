"""The target engine: a pass over the trees of all requests, their verification, and the commit to the KV cache."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from torch import Tensor

from native.sampling import requests_of
from orchestrator.core.errors import RequestError
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.types import Acceptance
from runtime.engine import bursts
from runtime.engine.burst_drafters import MAX_STEPS, BurstDrafters
from runtime.engine.bursts import Planned, StepCall
from runtime.engine.calls import GuidedStep
from runtime.engine.kv.pressure import BlockPressure
from runtime.engine.kv.sequences import CachedSequence
from runtime.engine.loads import ForwardTimer, load_of, loads_of
from runtime.engine.paged import PagedEngine, PagedModel
from runtime.engine.sampling import served
from runtime.engine.schedule import Scheduler
from runtime.engine.verify import VerifyInput, VerifyResult, verify
from runtime.models.native.decoding import DecodedSteps, Decoding, has_room
from runtime.models.native.model import NativeModel

#: How long the engine pauses while every call waits for blocks.
BLOCKS_POLL_S = 0.002


class TargetEngine(PagedEngine[StepRequest]):
    """Answers target steps; contexts that are too long for one pass are computed in parts.

    Invariant: an answer does not depend on the other requests in the pass: bit for bit in the native forward pass, up
    to rounding with torch.
    """

    def __init__(self, paged: PagedModel) -> None:
        super().__init__(paged)
        self.pressure = BlockPressure(paged.sequences, self._on_preempt)
        self._calls: list[StepCall] = []
        # On a CPU, batching does not make rows cheaper.
        self._scheduler = Scheduler(is_separate=isinstance(paged.model, NativeModel))

    def advance(self, calls: list[StepCall]) -> list[StepCall]:
        """Run a pass, answer the calls that are complete, and return the others, including those waiting for blocks."""
        self._calls = calls
        left = super().advance(calls)
        if len(left) == len(calls) and not any(call.sequence for call in left):
            time.sleep(BLOCKS_POLL_S)  # nothing was computed; blocks become free when other sequences call or end
        now_s = time.monotonic()
        for call in left:
            bursts.answer_if_due(call, now_s)
        return [call for call in left if not call.answered]

    def _open_all(self, calls: list[StepCall]) -> None:
        # The oldest first, so that no sequence begins while an older one waits for blocks.
        self._others_wait = False
        number = self.sequences.number_of
        super()._open_all(sorted(calls, key=lambda call: (number(call.sequence_id), call.arrived_s)))

    def _open(self, call: StepCall) -> None:
        if call.answer_finished():
            return  # its sequence has lost its blocks
        tree = call.request.tree
        if call.request.sampling.logits_options.grammar and not isinstance(call.request, GuidedStep):
            raise RequestError("this engine was started without a tokenizer, which a grammar needs")
        self.paged.check_ids(call)
        self.sequences.check_capacity(call.request.max_len)
        depth = int(tree.depths.max())
        call.sequence = self.pressure.open(call.delta, tree.num_nodes, depth, self._others_wait)
        self._others_wait |= call.sequence is None

    def _num_nodes(self, call: StepCall) -> int:
        return bursts.draft_of(call).tree.num_nodes

    def _on_preempt(self, sequence: CachedSequence) -> None:
        """Make the call of a sequence that has lost its blocks wait for new ones."""
        for call in self._calls:
            if call.sequence is sequence:
                call.sequence = None

    def _run(self, planned: Planned) -> None:
        """Run the passes that the scheduler makes of a plan."""
        parts, in_plan = bursts.parts_of(planned), {call for call, _ in planned}
        others = [bursts.kind_of(call) for call in self._calls if not (call.answered or call in in_plan)]
        for each in self._scheduler.passes(parts, others):
            for part in each.due:
                part.item[0].answer_finished()
            self._run_pass(
                [part.item for part in each.parts], each.limit_s, each.is_atypical, each.num_in_separate_pass
            )

    def _run_pass(
        self, planned: Planned, limit_s: float, is_atypical: bool = False, num_in_separate_pass: int = 0
    ) -> None:
        """Run a pass, or a burst until limit_s is over; answer the calls that are complete.

        limit_s: 0 = one pass, after which every call that has nothing left to compute is answered.
        num_in_separate_pass: calls that have a separate pass beside this one.
        """
        forward = ForwardTimer(self.paged.model.device)
        began_s = forward.began_s
        if decoded := self._decode(planned, limit_s):
            self._note_burst(planned, decoded, began_s, limit_s > 0.0, num_in_separate_pass)
            return
        planned = [each for each in planned if not each[0].answer_finished()]
        if not planned:
            return
        self.progress.count(len(planned))
        for call, segment in planned:
            if segment.last == call.delta.prefix_len:  # otherwise it is a part of a long context, without the tree
                segment.tree = call.request.tree
        logits = self.paged.forward([segment for _, segment in planned])
        forward.stop()
        parts = (logits,) if len(planned) == 1 else logits.split([segment.tree.num_nodes + 1 for _, segment in planned])
        complete = [
            (call, part)
            for (call, segment), part in zip(planned, parts, strict=True)
            if segment.last == call.delta.prefix_len
        ]
        results = verify([self._verify_input(call) for call, _ in complete], [part for _, part in complete])
        self.paged.commit(
            [
                (call.opened, call.request.tree, result.accepted)
                for (call, _), result in zip(complete, results, strict=True)
            ]
        )
        forward_s = forward.elapsed_s()
        verify_s = time.monotonic() - began_s - forward_s
        features = self.paged.features([(call.opened, call.request.options) for call, _ in complete])
        load = load_of(planned, results, is_atypical, num_in_separate_pass)
        for (call, part), result, own in zip(complete, results, features, strict=True):
            answer = replace(
                self._settle(call, part, result),
                features=own.states,
                features_start=own.start,
                queue_us=_us(began_s - call.arrived_s),
                forward_us=_us(forward_s),
                verify_us=_us(verify_s),
                num_in_pass=len(planned) + num_in_separate_pass,
                load=load,
                num_in_separate_pass=num_in_separate_pass,
            )
            call.reply(answer)

    def _decode(self, planned: Planned, limit_s: float) -> list[DecodedSteps] | None:
        """Run a burst in native code, and return the steps of each call; None if that is impossible."""
        with BurstDrafters.borrowed(planned, self.progress, self.paged.model.feature_columns) as drafters:
            if not drafters.are_ready or not (decoding := self._burst(planned, limit_s)):
                return None
            segments, drafts = [segment for _, segment in planned], [bursts.draft_of(call) for call, _ in planned]
            decoded = self.paged.decode(segments, drafts, decoding._replace(drafters=drafters.uses))
            drafters.settle(decoded)
            return decoded

    def _burst(self, planned: Planned, limit_s: float) -> Decoding | None:
        """Return the burst that native code can run for these calls until limit_s is over; None if it cannot."""
        model, now_s = self.paged.model, time.monotonic()
        if not isinstance(model, NativeModel):
            return None
        parts = [each for call, segment in planned if (each := bursts.burst_of(call, segment, now_s))]
        continuations = [each.continuation for each in parts]
        if len(parts) < len(planned) or not has_room(continuations, model.vocab_size):
            return None
        for continuation, (call, segment) in zip(continuations, planned, strict=True):
            num_nodes = continuation.drafts.max_nodes if continuation.drafts else 0
            ahead = min(continuation.max_tokens, MAX_STEPS) + num_nodes
            call.opened.reserve_up_to(segment.last + ahead - 1)
        return Decoding(
            requests_of([call.request.sampling for call, _ in planned]),
            continuations,
            min(MAX_STEPS, *(each.max_steps for each in parts)),
            min(limit_s, *(each.limit_s for each in parts)),
            self.progress.num_waiting,
        )

    def _note_burst(
        self, planned: Planned, decoded: list[DecodedSteps], began_s: float, may_wait: bool, num_in_separate_pass: int
    ) -> None:
        """Note a burst. may_wait: calls may stay unanswered until their hold is over, so that the burst can resume."""
        self.progress.count(len(planned), num_passes=len(decoded[0].steps))
        # A segment now ends where the burst has; the steps extended what was before it.
        context_lens = [
            segment.last - len(each.tokens) + 1 for (_, segment), each in zip(planned, decoded, strict=True)
        ]
        loads = [*loads_of(zip(*(each.steps for each in decoded), strict=True), context_lens, num_in_separate_pass)]
        now_s = time.monotonic()
        for (call, _), each in zip(planned, decoded, strict=True):
            call.opened.publish(len(call.opened.ids))
            bursts.note(call, each, loads, began_s, now_s)
            if not may_wait:
                call.answer_finished()

    def _verify_input(self, call: StepCall) -> VerifyInput:
        request = call.request
        return VerifyInput(
            request.tree,
            request.q,
            call.delta.prefix_len,
            request.sampling,
            call.opened.context,
            self._processors(call),
            request.options.target_tokens,
            request.legal if isinstance(request, GuidedStep) else None,
        )

    def _settle(self, call: StepCall, logits: Tensor, result: VerifyResult) -> Acceptance:
        """Return the answer, without features, once its path is committed; logits: (m + 1, V), after root and nodes."""
        accepted, options = result.accepted, call.request.options
        logprobs = top_ids = top_logprobs = None
        if options.logprobs or options.num_top:
            rows = logits[[0, *accepted.path]]
            if options.logprobs:
                committed = Acceptance(*accepted).tokens(call.request.tree)
                logprobs = np.array(served.log_probs_of(rows, committed))
            if options.num_top:
                top_ids, top_logprobs = served.top_log_probs(rows, options.num_top)
        node_top_ids = served.top_ids(logits, options.num_node_top) if options.num_node_top else None
        return Acceptance(
            *accepted,
            target_tokens=np.array(result.target_tokens, np.int32) if options.target_tokens else None,
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            num_cached_tokens=call.opened.num_cached,
            node_top_ids=node_top_ids,
        )


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
