"""Target steps and drafts as requests to the executor: the whole context goes in, new tokens come out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from orchestrator.core.deployment.capabilities import Capabilities
from orchestrator.core.deployment.engine_manifest import LlmManifest, Manifest
from orchestrator.core.errors import EngineError, RequestError
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.noise import child_seed
from orchestrator.core.sampled_drafts import MAX_CANDIDATES, draft_distribution
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, Distribution, DraftResponse, StepOptions
from runtime.engine.calls import EngineCall
from runtime.engine.sampling import served
from runtime.trtllm.adapter import Adapter, EngineRequest, generated_tokens
from runtime.trtllm.executor.sampling import changes_logits, logits_arguments, sampling_config

#: Logit of a token that q excludes; its probability is 0 in float32.
IMPOSSIBLE = -1e4
#: Index of the draft model's seed; larger than any position, because positions index the seeds of the target's steps.
DRAFTS = 1 << 31


class TargetAdapter(Adapter[StepRequest]):
    """Checks target steps against what the engine can do.

    api: the module of the library that has the classes of its requests.
    """

    def __init__(self, api: Any, manifest: Manifest | LlmManifest, capabilities: Capabilities) -> None:
        self._api = api
        self._manifest = manifest
        self._capabilities = capabilities

    def to_request(self, call: EngineCall[StepRequest], ids: list[int]) -> EngineRequest:
        """Return the executor's request; raises RequestError for a step that it cannot serve.

        Anything that the library would silently shorten (llmRequest.cpp, validate) is refused or cut here.
        """
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

    Invariant: without draft probabilities the executor accepts a draft token if and only if it samples the same token
    there; with them (rule `rejection`), it does so with probability min(1, p/q). So at temperature 0 the text is the
    target's, whatever was drafted; above 0, it has the target's distribution but depends on the drafts.
    """

    _manifest: Manifest

    def from_result(self, call: EngineCall[StepRequest], request: EngineRequest, results: list[Any]) -> Acceptance:
        """Return the step's outcome; how many drafts were accepted is inferred, as the executor does not say."""
        tokens = generated_tokens(request, results[0], self._manifest.vocab_size)
        pairs = zip(tokens[:-1], request.drafts, strict=False)
        num_accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        emitted, options = tokens[: num_accepted + 1], call.request.options
        # Node i of a chain is its i-th draft token.
        answer = Acceptance(tuple(range(1, num_accepted + 1)), emitted[-1])
        return self._with_logprobs(answer, emitted, results[0], options) if _wants_logits(options) else answer

    def _to_request(self, call: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        sampling, drafts = call.request.sampling, self._drafts(call.request, len(ids), num_output)
        arguments = logits_arguments(sampling, num_output, self._manifest.vocab_size)
        if drafts:  # an empty list fails an assertion of the library
            logits = draft_logits(call.request.q[: len(drafts)], self._manifest.padded_vocab_size)
            arguments["external_draft_tokens_config"] = self._api.ExternalDraftTokensConfig(drafts, logits=logits)
        payload = self._api.Request(
            ids,
            len(drafts) + 1,
            sampling_config=sampling_config(self._api, sampling, len(ids), num_output),
            # The library's own log-probabilities are those after top-k and top-p; ours are the model's.
            output_config=self._api.OutputConfig(return_generation_logits=_wants_logits(call.request.options)),
            **arguments,
            **salt_arguments(self._api, call.delta.cache_salt),
        )
        return EngineRequest(payload, ids, len(drafts) + 1, drafts)

    def _drafts(self, request: StepRequest, num_ids: int, num_output: int) -> list[int]:
        """Return as much of the chain as the engine takes; nothing for a request that changes single logits.

        The library needs room for the text and the drafts, and for an output of the drafts and one token; otherwise it
        would shorten the output.
        """
        if changes_logits(request.sampling, num_output):
            return []
        limits = self._manifest
        room = (limits.max_seq_len + limits.max_draft_len - num_ids - 1) // 2
        drafts: list[int] = request.tree.tokens[: max(min(limits.max_draft_len, room), 0)].tolist()
        return drafts

    def _with_logprobs(self, answer: Acceptance, emitted: list[int], result: Any, options: StepOptions) -> Acceptance:
        logits = generation_logits(result, len(emitted), self._manifest.vocab_size)
        if options.logprobs:
            answer = replace(answer, logprobs=np.array(served.log_probs_of(logits, emitted)))
        if options.num_top:
            top_ids, top_logprobs = served.top_log_probs(logits, options.num_top)
            answer = replace(answer, top_ids=top_ids, top_logprobs=top_logprobs)
        return answer


def generation_logits(result: Any, num_rows: int, vocab_size: int) -> Tensor:
    """Return the logits of the new tokens, (num_rows, vocab_size), without the padding of the vocabulary."""
    logits = result.generation_logits
    if logits is None or logits.ndim != 3 or logits.shape[1] < num_rows:
        shape = None if logits is None else tuple(logits.shape)
        raise EngineError(f"TensorRT-LLM answered {num_rows} tokens with logits of shape {shape}")
    rows: Tensor = logits[0, :num_rows, :vocab_size]
    return rows


class DraftAdapter(Adapter[DraftRequest]):
    """Answers draft calls with a chain: sampled, with its q, for a rule that reads q, and greedy for the others.

    Target and draft model draw independent random numbers, so the draft that the target's sample matches most often is
    the likeliest token.
    Invariant: each sampled token is drawn from the q returned with it, over at most MAX_CANDIDATES probable tokens.
    """

    def __init__(self, api: Any, manifest: Manifest) -> None:
        self._api = api
        self._manifest = manifest

    def to_request(self, call: EngineCall[DraftRequest], ids: list[int]) -> EngineRequest | DraftResponse:
        """Return the executor's request, or a bare root when no draft fits."""
        length = min(call.request.max_nodes, call.request.max_depth, self._manifest.max_seq_len - len(ids))
        if length < 1 or len(ids) > self._manifest.max_input_len:
            return DraftResponse(TokenTree.bare())
        sampling = _draft_sampling(call.request.sampling)
        payload = self._api.Request(
            ids,
            length,
            sampling_config=sampling_config(self._api, sampling, len(ids), 0),
            output_config=self._api.OutputConfig(return_generation_logits=not sampling.greedy),
            **salt_arguments(self._api, call.delta.cache_salt),
        )
        return EngineRequest(payload, ids, length)

    def from_result(self, call: EngineCall[DraftRequest], request: EngineRequest, results: list[Any]) -> DraftResponse:
        """Return the new tokens as a chain, with their q for a rule that reads it."""
        tokens = generated_tokens(request, results[0], self._manifest.vocab_size)
        sampling = _draft_sampling(call.request.sampling)
        if sampling.greedy:
            return DraftResponse(TokenTree.chain(tokens))
        logits = generation_logits(results[0], len(tokens), self._manifest.vocab_size)
        log_q = served.log_p(logits.cpu(), [sampling] * len(logits)).numpy()
        q = tuple(_distribution(row) for row in log_q)
        return DraftResponse(TokenTree.chain(tokens), q)


def _draft_sampling(sampling: Sampling) -> Sampling:
    """Return the draft model's sampling: the target's temperature and capped top_k if the rule reads q, else greedy."""
    if sampling.greedy or not sampling.rule.uses_q:
        return Sampling()
    top_k = min(sampling.top_k or MAX_CANDIDATES, MAX_CANDIDATES)
    # Not the seed of the target's draws: drafts that depend on those would not be samples of q.
    return Sampling(sampling.temperature, top_k=top_k, seed=child_seed(sampling.seed, DRAFTS))


def _distribution(log_q: npt.NDArray[np.float64]) -> Distribution:
    ids = np.flatnonzero(np.isfinite(log_q)).astype(np.int32)
    return draft_distribution(ids, np.exp(log_q[ids]))


def draft_logits(q: Sequence[Distribution], num_columns: int) -> Tensor | None:
    """Return log q at each draft token, (n, num_columns) float32; the library takes their softmax.

    None without q. Tokens outside q get a logit so low that its probability is 0 in float32, but finite, because a
    softmax over infinities is NaN.
    """
    if not q:
        return None
    logits = torch.full((len(q), num_columns), IMPOSSIBLE)
    for row, each in zip(logits, q, strict=True):
        row[torch.from_numpy(each.ids.astype(np.int64))] = torch.from_numpy(np.log(each.probs)).float()
    return logits


def salt_arguments(api: Any, cache_salt: str) -> dict[str, int]:
    """Return the argument of Request that keeps requests with different salts from sharing KV blocks.

    Raises RequestError where the bindings lack it, as the first ones of 1.0 do (cpp/tensorrt_llm/nanobind).
    """
    if not cache_salt:
        return {}
    if not hasattr(api.Request, "cache_salt_id"):
        raise RequestError("this release of TensorRT-LLM cannot keep KV blocks apart by a salt (input cache_salt)")
    digest = blake2b(cache_salt.encode(), digest_size=8).digest()
    return {"cache_salt_id": int.from_bytes(digest) >> 1}  # 63 bits fit any 64-bit integer


def _wants_logits(options: StepOptions) -> bool:
    return bool(options.logprobs or options.num_top)
