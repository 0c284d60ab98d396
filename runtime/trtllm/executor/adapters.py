"""Target steps and drafts as requests of the executor: the whole context goes out, new tokens come back."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
from torch import Tensor

from orchestrator.core.errors import EngineError, RequestError
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, DraftResponse, StepOptions
from orchestrator.deployment.capabilities import Capabilities
from orchestrator.deployment.engine_manifest import LlmManifest, Manifest
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from runtime.engine.calls import EngineCall
from runtime.sampling import served
from runtime.trtllm.adapter import Adapter, EngineRequest, generated_tokens
from runtime.trtllm.executor.sampling import changes_logits, logits_arguments, sampling_config


class TargetAdapter(Adapter[StepRequest]):
    """Checks target steps against what the engine can do.

    api: the library's module with the classes of its requests.
    """

    def __init__(self, api: Any, manifest: Manifest | LlmManifest, capabilities: Capabilities) -> None:
        self._api = api
        self._manifest = manifest
        self._capabilities = capabilities

    def to_request(self, call: EngineCall[StepRequest], ids: list[int]) -> EngineRequest:
        """Return the executor's request; raises RequestError for a step that it cannot serve."""
        request = call.request
        branches = "" if request.tree.is_chain else "siblings in its tree"
        if refusal := self._capabilities.refusal(request.sampling, request.options, branches=branches):
            raise RequestError(refusal)
        longest = min(self._manifest.max_input_len, self._manifest.max_seq_len - 1)
        if len(ids) > longest:
            raise RequestError(f"the text so far has {len(ids)} tokens, the engine was built for at most {longest}")
        return self._to_request(call, ids, len(ids) - call.delta.prompt_len)

    @abstractmethod
    def _to_request(self, call: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        """Return the executor's request; num_output: how many of `ids` are output."""


class StepAdapter(TargetAdapter):
    """Sends each step as one request, with the chain as external draft tokens.

    Invariant: the executor accepts a draft token exactly when it samples the same token at that place. So at
    temperature 0 the text is the target's, whatever was drafted; above, it has the target's distribution, and
    depends on the drafts.
    """

    def from_result(self, call: EngineCall[StepRequest], request: EngineRequest, results: list[Any]) -> Acceptance:
        """Infer from the new tokens how many drafts were accepted, which the executor does not say."""
        tokens = generated_tokens(request, results[0], self._manifest.vocab_size)
        pairs = zip(tokens[:-1], request.drafts, strict=False)
        num_accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        emitted, options = tokens[: num_accepted + 1], call.request.options
        # Node i of a chain is its i-th draft token.
        answer = Acceptance(tuple(range(1, num_accepted + 1)), emitted[-1])
        return self._with_logprobs(answer, emitted, results[0], options) if _wants_logits(options) else answer

    def _to_request(self, call: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        sampling, drafts = call.request.sampling, self._drafts(call.request, num_output)
        arguments = logits_arguments(sampling, num_output, self._manifest.vocab_size)
        if drafts:  # an empty list fails an assertion of the library
            arguments["external_draft_tokens_config"] = self._api.ExternalDraftTokensConfig(drafts)
        payload = self._api.Request(
            ids,
            len(drafts) + 1,
            sampling_config=sampling_config(self._api, sampling, len(ids), num_output),
            # The library's own log-probabilities are those after top-k and top-p; ours are the model's.
            output_config=self._api.OutputConfig(return_generation_logits=_wants_logits(call.request.options)),
            **arguments,
            **salt_arguments(call.delta.cache_salt),
        )
        return EngineRequest(payload, ids, len(drafts) + 1, drafts)

    def _drafts(self, request: StepRequest, num_output: int) -> list[int]:
        """Return as much of the chain as the engine takes; nothing for a request that changes single logits."""
        if changes_logits(request.sampling, num_output):
            return []
        drafts: list[int] = request.tree.tokens[: self._manifest.max_draft_len].tolist()
        return drafts

    def _with_logprobs(self, answer: Acceptance, emitted: list[int], result: Any, options: StepOptions) -> Acceptance:
        logits = self._logits(result, len(emitted))
        if options.logprobs:
            answer = replace(answer, logprobs=np.array(served.log_probs_of(logits, emitted)))
        if options.num_top:
            top_ids, top_logprobs = served.top_log_probs(logits, options.num_top)
            answer = replace(answer, top_ids=top_ids, top_logprobs=top_logprobs)
        return answer

    def _logits(self, result: Any, num_rows: int) -> Tensor:
        """Return the logits of the emitted tokens, (num_rows, V), without the padding of the vocabulary."""
        logits = result.generation_logits
        if logits is None or logits.ndim != 3 or logits.shape[1] < num_rows:
            shape = None if logits is None else tuple(logits.shape)
            raise EngineError(f"TensorRT-LLM answered {num_rows} tokens with logits of shape {shape}")
        rows: Tensor = logits[0, :num_rows, : self._manifest.vocab_size]
        return rows


class DraftAdapter(Adapter[DraftRequest]):
    """Answers draft calls with the greedy continuation of the context, at any temperature.

    Target and draft model have random numbers of their own, so the token that the target's sample matches most often is
    the likeliest one.
    """

    def __init__(self, api: Any, manifest: Manifest) -> None:
        self._api = api
        self._manifest = manifest

    def to_request(self, call: EngineCall[DraftRequest], ids: list[int]) -> EngineRequest | DraftResponse:
        """Return the executor's request, or a bare root when no draft fits."""
        length = min(call.request.max_nodes, call.request.max_depth, self._manifest.max_seq_len - len(ids))
        if length < 1 or len(ids) > self._manifest.max_input_len:
            return DraftResponse(TokenTree.bare())
        greedy = self._api.SamplingConfig(top_k=1)
        payload = self._api.Request(ids, length, sampling_config=greedy, **salt_arguments(call.delta.cache_salt))
        return EngineRequest(payload, ids, length)

    def from_result(self, call: EngineCall[DraftRequest], request: EngineRequest, results: list[Any]) -> DraftResponse:
        """Return the new tokens as a chain."""
        return DraftResponse(TokenTree.chain(generated_tokens(request, results[0], self._manifest.vocab_size)))


def salt_arguments(cache_salt: str) -> dict[str, int]:
    """Return the argument of Request that keeps requests with different salts from sharing KV blocks."""
    if not cache_salt:
        return {}
    digest = blake2b(cache_salt.encode(), digest_size=8).digest()
    return {"cache_salt_id": int.from_bytes(digest) >> 1}  # 63 bits fit any 64-bit integer


def _wants_logits(options: StepOptions) -> bool:
    return bool(options.logprobs or options.num_top)
