"""NOT TensorRT-LLM: an executor on a thread, which runs an iteration of all requests at hand at a time."""

import itertools
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_llm
from tensorrt_llm.bindings._configs import ExecutorConfig, ModelType, Request, check, typed
from tensorrt_llm.bindings._engine import Engine
from tensorrt_llm.bindings._journal import Journal
from tensorrt_llm.bindings._results import (
    FinishReason,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingMetrics,
)
from tensorrt_llm.bindings._sampling import pick, probabilities, softmax


@dataclass
class Active:
    """A request under way."""

    id: int
    request: Request
    rng: Any
    generated: list = field(default_factory=list)
    rows: list = field(default_factory=list)
    num_iterations: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    finish: FinishReason = FinishReason.NOT_FINISHED


class Executor:
    """Also, for tests: gate, which an iteration waits for; poison, a token id whose requests fail; `break_down`."""

    def __init__(self, model_path, model_type, executor_config):
        self._config = typed("executor_config", executor_config, ExecutorConfig)
        check(typed("model_type", model_type, ModelType) is ModelType.DECODER_ONLY, "decoder only, in this stand-in")
        self._check_ranks(Path(model_path))
        self.engine = Engine(model_path, tensorrt_llm.__version__, executor_config)
        self.gate, self.poison, self.broken = threading.Event(), None, False
        self.gate.set()
        self.num_enqueued, self.cancelled, self.most_at_once, self.num_passes = 0, [], 0, 0
        self._journal = Journal(model_path)
        self._ids = itertools.count(1)
        self._active: list[Active] = []
        self._responses: list[Response] = []
        self._changed = threading.Condition()
        self._shut = False
        self._thread = threading.Thread(target=self._run, name="standin-executor", daemon=True)
        self._thread.start()

    def _check_ranks(self, folder):
        num_ranks = len(list(folder.glob("rank*.engine")))
        if num_ranks > 1:
            check(self._config.parallel_config is not None, f"world size 1, and an engine of {num_ranks}")
            self._config.parallel_config.check(num_ranks)

    def can_enqueue_requests(self):
        if self._journal.is_to_break():
            self.break_down()
        return not (self._shut or self.broken)

    def enqueue_request(self, request):
        if not isinstance(request, Request):
            raise TypeError("incompatible function arguments: request must be a Request")
        check(self.can_enqueue_requests(), "the executor is shut down")
        with self._changed:
            self.num_enqueued += 1
            active = Active(next(self._ids), request, np.random.default_rng(request.sampling_config.seed or 0))
            self._journal.note("enqueued", id=active.id, drafts=len(request.drafts), max_tokens=request.max_tokens)
            self._fetch(active)
            self._changed.notify_all()
            return active.id

    def _fetch(self, active):
        """Take a request in; one that the engine cannot run is answered by an error, nothing is raised.

        Source: Executor::Impl::fetchNewRequests (executor/executorImpl.cpp), which validates off the caller's thread.
        """
        try:
            self.engine.validate(active.request)
            wants_logits = active.request.output_config.return_generation_logits
            check(self._config.gather_generation_logits or not wants_logits, "gather_generation_logits is off")
        except Exception as error:
            words = f"Encountered an error when fetching new request: {error}"
            self._responses.append(Response(active.id, _error=words))
            self._journal.note("refused", id=active.id, error=words)
        else:
            self._active.append(active)

    def enqueue_requests(self, requests):
        return [self.enqueue_request(request) for request in requests]

    def await_responses(self, timeout=None):
        if timeout is not None and not isinstance(timeout, timedelta):
            raise TypeError("incompatible function arguments: timeout must be a timedelta")
        if self._journal.is_to_break():
            self.break_down()
        with self._changed:
            self._changed.wait_for(
                lambda: self._responses or self.broken, None if timeout is None else timeout.total_seconds()
            )
            if self.broken:
                raise RuntimeError("the executor's worker has died")
            responses, self._responses = self._responses, []
            return responses

    def cancel_request(self, request_id):
        typed("request_id", request_id, int)
        with self._changed:
            self.cancelled.append(request_id)
            self._journal.note("cancelled", id=request_id)
            for active in self._active:
                if active.id == request_id:
                    active.finish = FinishReason.CANCELLED
            self._changed.notify_all()

    def get_latest_iteration_stats(self):
        return []

    def shutdown(self):
        with self._changed:
            self._shut = True
            self._changed.notify_all()
        self.gate.set()
        self._thread.join()

    def break_down(self):
        """For tests: die as a worker does."""
        with self._changed:
            self.broken = True
            self._changed.notify_all()

    def _run(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._active or self._shut or self.broken)
                if self._shut or self.broken:
                    return
            self.gate.wait()
            self._journal.await_leave(self.num_passes, lambda: self._shut)
            with self._changed:
                batch = self._active[: self.engine.max_batch_size]
            self.num_passes += 1
            self.most_at_once = max(self.most_at_once, len(batch))
            self._journal.note("pass", number=self.num_passes, ids=[active.id for active in batch])
            responses = self._forward(batch)
            with self._changed:
                self._responses += responses
                for ended in (a for a in self._active if a.finish is not FinishReason.NOT_FINISHED):
                    self._journal.note("ended", id=ended.id, reason=ended.finish.name)
                self._active = [a for a in self._active if a.finish is FinishReason.NOT_FINISHED]
                self._changed.notify_all()

    def _forward(self, batch):
        """Run one pass; an error in it ends every active request.

        Source: Executor::Impl::forwardAsync and terminateActiveRequests (executor/executorImpl.cpp).
        """
        try:
            self.engine.schedule(batch)
            for active in batch:
                self.engine.check_in_pass(active.request)
            return [response for active in batch if (response := self._iterate(active))]
        except Exception as error:
            words = f"Encountered an error in forwardAsync function: {error}"
            with self._changed:
                ended = [active for active in self._active if active.finish is FinishReason.NOT_FINISHED]
            for active in ended:
                active.finish = FinishReason.LENGTH
            return [Response(active.id, _error=words) for active in ended]

    def _iterate(self, active):
        """Run one iteration of a request; return its response, if there is one."""
        if active.finish is FinishReason.CANCELLED:
            return self._response(active, [])
        if self.poison in active.request.input_token_ids:
            active.finish = FinishReason.LENGTH
            return Response(active.id, _error="poisoned, as the test asked")
        drafts = self._drafts(active)
        context = active.request.input_token_ids + active.generated
        rows = self.engine.logits(context + drafts, len(drafts) + 1)
        new = self._verified(active, context, drafts, rows)
        active.rows += list(rows[: len(new)])
        active.generated += new
        active.num_iterations += 1
        # The library counts a path, not a tree's nodes: LlmRequest::updateNumTokensPerIteration, and the caller's
        # min(numDraftTokens, maxDraftPathLen) in trtGptModelInflightBatching.cpp.
        active.num_drafted += len(drafts)
        active.num_accepted += len(new) - 1
        self._finish(active)
        return self._response(active, new)

    def _drafts(self, active):
        """Return external drafts in the first iteration; an engine's own after the first, which reads the prompt."""
        room = active.request.max_tokens - len(active.generated) - 1
        if self.engine.drafts_inside and active.generated:
            return self.engine.guess(active.request, active.generated, active.rng)[:room]
        return active.request.drafts[:room] if not active.num_iterations else []

    def _verified(self, active, context, drafts, rows):
        """Return the tokens up to the first that is not the draft in its place: token match, or by probabilities."""
        external = active.request.external_draft_tokens_config
        if external is not None and external.logits is not None and not active.num_iterations:
            return self._verified_by_logits(active, context, drafts, rows, external.logits)
        new = []
        for row, draft in itertools.zip_longest(rows, drafts):
            new.append(pick(row, active.request, context + new, len(active.generated) + len(new), active.rng))
            if new[-1] != draft or new[-1] == active.request.end_id:
                break
        return new

    @staticmethod
    def _verified_by_logits(active, context, drafts, rows, draft_logits):
        """Accept each draft with probability min(1, p/q), with p the sampler's and q the softmax of the draft logits.

        Source: layers/externalDraftTokensLayer.cpp and the kernels that it calls, with a random threshold.
        """
        new = []
        for row, draft, logits in zip(rows, drafts, draft_logits.double().numpy(), strict=False):
            p, q = probabilities(row, active.request, context + new, len(active.generated) + len(new)), softmax(logits)
            if active.rng.random() >= p[draft] / max(q[draft], 1e-300):
                residual = np.maximum(p - q[: len(p)], 0.0)
                residual = residual if residual.sum() > 0 else p
                return [*new, int(active.rng.choice(len(p), p=residual / residual.sum()))]
            new.append(draft)
        last = pick(rows[len(drafts)], active.request, context + new, len(active.generated) + len(new), active.rng)
        return [*new, last]

    @staticmethod
    def _finish(active):
        request = active.request
        if active.finish is not FinishReason.NOT_FINISHED:
            return  # cancelled meanwhile
        if request.end_id is not None and active.generated[-1] == request.end_id:
            active.finish = FinishReason.END_ID
        # A request with external drafts is one verification: accepted + 1 tokens, whatever max_tokens says.
        elif request.drafts or len(active.generated) >= request.max_tokens:
            active.finish = FinishReason.LENGTH

    def _response(self, active, new):
        request, is_final = active.request, active.finish is not FinishReason.NOT_FINISHED
        if active.finish is FinishReason.CANCELLED:
            return Response(active.id, Result(True, [[]], finish_reasons=[active.finish]))
        if not (request.streaming or is_final):
            return None
        output = request.output_config
        tokens = active.generated if request.return_all_generated_tokens or not request.streaming else new
        result = Result(
            is_final,
            [list(tokens) if request.streaming else request.input_token_ids + tokens],
            finish_reasons=[active.finish],
            is_sequence_final=is_final,
            decoding_iter=active.num_iterations,
            avg_decoded_tokens_per_iter=len(active.generated) / active.num_iterations,
        )
        if output.return_generation_logits:
            rows = self.engine.padded(active.rows[-len(tokens) :])
            result.generation_logits = rows[:, None] if request.streaming else rows[None]
        if output.return_perf_metrics:
            rate = active.num_accepted / active.num_drafted if active.num_drafted else 0.0
            metrics = SpeculativeDecodingMetrics(rate, active.num_accepted, active.num_drafted)
            result.request_perf_metrics = RequestPerfMetrics(metrics)
        return Response(active.id, result)
