"""A target step as part of one streamed generation of the LLM API."""

from __future__ import annotations

from typing import Any

from orchestrator.core.errors import RequestError
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.types import Acceptance
from runtime.engine.calls import EngineCall
from runtime.trtllm.adapter import EngineRequest, Stream, streamed_tokens
from runtime.trtllm.executor.adapters import TargetAdapter
from runtime.trtllm.executor.engine_side import stream_acceptance


class LlmAdapter(TargetAdapter):
    """Answers target steps from a stream, or with one token when a step has no engine-side speculation.

    Invariant: at temperature 0 the text is the target's. How many drafts a pass verifies is fixed when the server
    starts; a request cannot choose.
    """

    def from_result(self, call: EngineCall[StepRequest], request: EngineRequest, results: list[Any]) -> Acceptance:
        """Return the tokens of the passes since the last call, or the one token."""
        limits, vocab_size = self._manifest, self._manifest.vocab_size
        if request.stream is None:
            return Acceptance((), streamed_tokens(results, request.length, vocab_size)[0])
        return stream_acceptance(request, results, self._capabilities.engine_method, limits.max_draft_len, vocab_size)

    def _to_request(self, call: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        """Return the arguments of generate_async.

        Only the generation loop ends a text. Inferred: an end id of -1 never matches a token.
        """
        sampling, speculation = call.request.sampling, call.request.options.engine_speculation
        if speculation and (speculation.choices or speculation.sizes):
            raise RequestError("the LLM API drafts as the server was started; a request cannot choose a tree or sizes")
        length = min(speculation.length if speculation else 1, self._manifest.max_seq_len - len(ids))
        values: dict[str, Any] = {
            "max_tokens": length,
            "ignore_eos": True,
            "end_id": -1,
            "detokenize": False,
            "top_k": 1,
        }
        if not sampling.greedy:  # a temperature without top_p would be greedy, too
            values |= {"top_k": sampling.top_k or None, "top_p": sampling.top_p}
            values |= {"temperature": sampling.temperature, "seed": sampling.seed}
        payload = {"inputs": list(ids), "sampling_params": self._api.SamplingParams(**values)}
        if call.delta.cache_salt:
            payload["cache_salt"] = call.delta.cache_salt
        return EngineRequest(payload, list(ids), length, stream=Stream(sampling, length) if speculation else None)
