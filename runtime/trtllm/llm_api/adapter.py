"""A target step as part of one streamed generation of the LLM API."""

from __future__ import annotations

from typing import Any

from orchestrator.core.errors import RequestError
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance
from orchestrator.deployment.capabilities import Capabilities
from orchestrator.deployment.engine_manifest import LlmManifest, Manifest
from orchestrator.wire.target import StepRequest
from runtime.engine.calls import EngineCall
from runtime.trtllm.adapter import EngineRequest, Stream, streamed_tokens
from runtime.trtllm.executor.engine_side import EngineSideAdapter
from runtime.trtllm.executor.library import Library
from runtime.trtllm.llm_api.transport import LlmRequest


class LlmAdapter(EngineSideAdapter):
    """Answers target steps from a stream, or with one token when a step has no engine-side speculation.

    Invariant: at temperature 0 the text is the target's. The server's start fixes how many drafts a pass verifies; a
    request cannot choose.
    """

    def __init__(self, llmapi: Any, manifest: LlmManifest, capabilities: Capabilities) -> None:
        """llmapi: the module tensorrt_llm.llmapi."""
        super().__init__(Library(llmapi, manifest.trtllm_version), _engine_manifest(manifest), capabilities)

    def from_result(self, call: EngineCall[StepRequest], request: EngineRequest, results: list[Any]) -> Acceptance:
        """Return what the passes since the last call have brought, or the one token."""
        if request.stream:
            return super().from_result(call, request, results)
        return Acceptance((), streamed_tokens(results, request.length, self._manifest.vocab_size)[0])

    def _to_request(self, call: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        sampling, speculation = call.request.sampling, call.request.options.engine_speculation
        if speculation and (speculation.choices or speculation.sizes):
            raise RequestError("the LLM API drafts as the server was started; a request cannot choose a tree or sizes")
        length = min(speculation.length if speculation else 1, self._manifest.max_seq_len - len(ids))
        payload = LlmRequest(list(ids), self._params(sampling, length), call.delta.cache_salt)
        return EngineRequest(payload, list(ids), length, stream=Stream(sampling, length) if speculation else None)

    def _params(self, sampling: Sampling, length: int) -> Any:
        """Return SamplingParams; a temperature without top_p would be greedy, too.

        The loop alone ends a text. Inferred: an end id that is no token's never comes.
        """
        values: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "end_id": -1, "detokenize": False}
        if sampling.greedy:
            return self._api.SamplingParams(top_k=1, **values)
        values |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        return self._api.SamplingParams(top_k=sampling.top_k or None, **values)


def _engine_manifest(manifest: LlmManifest) -> Manifest:
    """Return the limits in the manifest of a compiled engine, which the parent class reads."""
    return Manifest(
        role="target",
        method=manifest.method,
        mode="",
        gpu="",
        trtllm_version=manifest.trtllm_version,
        image=manifest.image,
        num_ranks=1,
        max_batch_size=0,
        max_input_len=manifest.max_input_len,
        max_seq_len=manifest.max_seq_len,
        max_draft_len=manifest.max_draft_len,
        vocab_size=manifest.vocab_size,
        inputs={},
        plan={},
    )
