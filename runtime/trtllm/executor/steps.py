"""A target step as one request of the executor: the whole context, the chain as external draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from orchestrator.core.errors import EngineError
from orchestrator.core.types import Acceptance, StepOptions
from orchestrator.wire.target import StepRequest
from runtime.engine.calls import EngineCall
from runtime.sampling import distribution
from runtime.trtllm.adapter import TargetAdapter, new_tokens, salt_of
from runtime.trtllm.executor.sampling import edits_of, is_edited, sampling_config
from runtime.trtllm.in_flight import EngineRequest


class StepAdapter(TargetAdapter):
    """Answers target steps, each a request of the executor.

    Invariant: the drafts that the executor accepts are its own picks in their places (token match), so at temperature 0 the
    text is the target's whatever was drafted; above, its law is the target's, and it depends on the drafts.
    """

    def answer(self, job: EngineCall[StepRequest], asked: EngineRequest, results: list[Any]) -> Acceptance:
        """Infer from the tokens that came back how many drafts were accepted: the executor does not say."""
        (result,) = results
        tokens = new_tokens(asked, result, self._manifest.vocab_size)
        num_accepted = min(_num_equal(tokens, asked.drafts), len(tokens) - 1)
        options, emitted = job.request.options, tokens[: num_accepted + 1]
        # A chain's node i is its i-th draft token.
        path = tuple(range(1, num_accepted + 1))
        if not (options.logprobs or options.num_top):
            return Acceptance(path, emitted[-1])
        logits = self._logits(result, len(emitted))
        top_ids, top_logprobs = distribution.top_log_probs(logits, options.num_top) if options.num_top else (None, None)
        logprobs = np.array(distribution.log_probs_of(logits, emitted)) if options.logprobs else None
        return Acceptance(path, emitted[-1], logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)

    def _drafts(self, request: StepRequest, num_output: int) -> list[int]:
        """Return as much of the chain as the engine takes; none where single logits change."""
        if is_edited(request.sampling, num_output):
            return []
        drafts: list[int] = request.tree.tokens[: self._manifest.max_draft_len].tolist()
        return drafts

    def _asked(self, job: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        sampling, drafts = job.request.sampling, self._drafts(job.request, num_output)
        arguments = edits_of(sampling, num_output, self._manifest.vocab_size)
        if drafts:  # an empty list is an assertion of the library's
            arguments["external_draft_tokens_config"] = self._api.ExternalDraftTokensConfig(drafts)
        request = self._api.Request(
            ids,
            len(drafts) + 1,
            sampling_config=sampling_config(self._api, sampling, len(ids), num_output),
            output_config=_output_config(self._api, job.request.options),
            **arguments,
            **salt_of(job.delta.cache_salt),
        )
        return EngineRequest(request, ids, len(drafts) + 1, drafts)

    def _logits(self, result: Any, num_rows: int) -> Tensor:
        """Return the logits of the emitted tokens, (a + 1, V), without the padding of the vocabulary."""
        logits = result.generation_logits
        if logits is None or logits.ndim != 3 or logits.shape[1] < num_rows:
            shape = None if logits is None else tuple(logits.shape)
            raise EngineError(f"TensorRT-LLM answered {num_rows} tokens with logits of shape {shape}")
        found: Tensor = logits[0, :num_rows, : self._manifest.vocab_size]
        return found


def _output_config(api: Any, options: StepOptions) -> Any:
    # Not its own log-probabilities: those are of what top-k and top-p leave, ours are the model's own.
    return api.OutputConfig(return_generation_logits=bool(options.logprobs or options.num_top))


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two lists have in common from their beginning."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
