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
from runtime.trtllm.adapter import checked_tokens, without_token
from runtime.trtllm.executor.engine_side import EngineSideAdapter
from runtime.trtllm.executor.library import Library
from runtime.trtllm.in_flight import EngineRequest, Stream
from runtime.trtllm.llm_api.executor import LlmRequest


class LlmAdapter(EngineSideAdapter):
    """Answers target steps with what a stream has brought, as its parent does; a step without drafts asks for a token.

    Invariant: at temperature 0 the text is the target's. Each pass verifies so many drafts as the server was started with: a
    request cannot choose.
    """

    def __init__(self, llmapi: Any, manifest: LlmManifest, capabilities: Capabilities) -> None:
        """llmapi: the module tensorrt_llm.llmapi."""
        super().__init__(Library(llmapi, manifest.trtllm_version), _as_engine(manifest), capabilities)

    def answer(self, job: EngineCall[StepRequest], asked: EngineRequest, results: list[Any]) -> Acceptance:
        """Return what the passes since the last call have brought, or the one token."""
        if job.request.options.engine_speculation is not None:
            return super().answer(job, asked, results)
        tokens = [token for result in results for token in result.output_token_ids[0]]
        if not tokens:
            raise without_token(results[-1])
        return Acceptance((), checked_tokens(tokens, asked.length, self._manifest.vocab_size)[0])

    def _asked(self, job: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        sampling, inside = job.request.sampling, job.request.options.engine_speculation
        if inside and (inside.choices or inside.sizes):
            raise RequestError("the LLM API drafts as the server was started; a request cannot choose a tree or sizes")
        length = min(inside.length if inside else 1, self._manifest.max_seq_len - len(ids))
        request = LlmRequest(list(ids), self._params(sampling, length), job.delta.cache_salt)
        return EngineRequest(request, list(ids), length, stream=Stream(sampling, length) if inside else None)

    def _params(self, sampling: Sampling, length: int) -> Any:
        """Return SamplingParams; a temperature without top_p would be greedy, too.

        The loop alone ends a text. Inferred: an end id that no token has is one that never comes.
        """
        values: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "end_id": -1, "detokenize": False}
        if sampling.greedy:
            return self._api.SamplingParams(top_k=1, **values)
        values |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        return self._api.SamplingParams(top_k=sampling.top_k or None, **values)


def _as_engine(manifest: LlmManifest) -> Manifest:
    """Return the limits in the words of a compiled engine, which is what the desks know."""
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
