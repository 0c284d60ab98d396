"""A target step as one request of the executor: the whole context, the chain as external draft tokens."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from torch import Tensor

from orchestrator.capabilities import Capabilities
from orchestrator.engine_manifest import Manifest
from orchestrator.errors import EngineError, RequestError
from orchestrator.types import Acceptance, Want
from orchestrator.wire import StepRequest
from runtime import sampling as logits_of
from runtime.job import Job
from runtime.trtllm.library import Library
from runtime.trtllm.line import Asked
from runtime.trtllm.sampling import edits_of, is_edited, sampling_config


class StepDesk:
    """Answers target steps; implements `runtime.trtllm.line.Desk`.

    Law: the drafts that the executor accepts are its own picks in their places (token match), so at temperature 0 the
    text is the target's whatever was drafted; above, its law is the target's, and it depends on the drafts.
    """

    def __init__(self, library: Library, manifest: Manifest, capabilities: Capabilities) -> None:
        self._api = library.api
        self._manifest = manifest
        self._capabilities = capabilities

    def ask(self, job: Job[StepRequest], ids: list[int]) -> Asked:
        """Return the executor's request; raises RequestError for what it cannot serve."""
        check_step(job.request, self._capabilities)
        check_length(ids, self._manifest)
        num_output = len(ids) - job.delta.prompt_len
        drafts = self._drafts(job.request, num_output)
        return Asked(self._request(job, ids, num_output, drafts), ids, drafts)

    def answer(self, job: Job[StepRequest], asked: Asked, result: Any) -> Acceptance:
        """Infer from the tokens that came back how many drafts were accepted: the executor does not say."""
        tokens = new_tokens(asked, result)
        num_accepted = min(_num_equal(tokens, asked.drafts), len(tokens) - 1)
        want, emitted = job.request.want, tokens[: num_accepted + 1]
        # A chain's node i is its i-th draft token.
        path = tuple(range(1, num_accepted + 1))
        if not (want.logprobs or want.num_top):
            return Acceptance(path, emitted[-1])
        logits = self._logits(result, len(emitted))
        top_ids, top_logprobs = logits_of.top_log_probs(logits, want.num_top) if want.num_top else (None, None)
        logprobs = np.array(logits_of.log_probs_of(logits, emitted)) if want.logprobs else None
        return Acceptance(path, emitted[-1], logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)

    def _drafts(self, request: StepRequest, num_output: int) -> list[int]:
        """Return as much of the chain as the engine takes; none where single logits change."""
        if is_edited(request.sampling, num_output):
            return []
        drafts: list[int] = request.tree.tokens[: self._manifest.max_draft_len].tolist()
        return drafts

    def _request(self, job: Job[StepRequest], ids: list[int], num_output: int, drafts: list[int]) -> Any:
        sampling = job.request.sampling
        arguments = edits_of(sampling, num_output, self._manifest.vocab_size)
        if drafts:  # an empty list is an assertion of the library's
            arguments["external_draft_tokens_config"] = self._api.ExternalDraftTokensConfig(drafts)
        return self._api.Request(
            ids,
            len(drafts) + 1,
            sampling_config=sampling_config(self._api, sampling, len(ids), num_output),
            output_config=_output_config(self._api, job.request.want),
            **arguments,
            **salt_of(job.delta.cache_salt),
        )

    def _logits(self, result: Any, num_rows: int) -> Tensor:
        """Return the logits of the emitted tokens, (a + 1, V), without the padding of the vocabulary."""
        logits = result.generation_logits
        if logits is None or logits.ndim != 3 or logits.shape[1] < num_rows:
            shape = None if logits is None else tuple(logits.shape)
            raise EngineError(f"TensorRT-LLM answered {num_rows} tokens with logits of shape {shape}")
        found: Tensor = logits[0, :num_rows, : self._manifest.vocab_size]
        return found


def check_step(request: StepRequest, capabilities: Capabilities) -> None:
    """Raise RequestError when the engine cannot serve a step."""
    branches = "" if request.tree.is_chain else "siblings in its tree"
    if refusal := capabilities.refusal(request.sampling, request.want, branches=branches):
        raise RequestError(refusal)


def check_length(ids: list[int], manifest: Manifest) -> None:
    """Raise RequestError when the engine has no room for the context and one token behind it."""
    longest = min(manifest.max_input_len, manifest.max_seq_len - 1)
    if len(ids) > longest:
        raise RequestError(f"the text so far has {len(ids)} tokens, the engine was built for at most {longest}")


def new_tokens(asked: Asked, result: Any) -> list[int]:
    """Return the tokens behind the input, with which a result begins; raises EngineError when there are none."""
    output: list[int] = list(result.output_token_ids[0])
    if not output:
        reasons = ", ".join(str(reason) for reason in result.finish_reasons)
        raise EngineError(f"TensorRT-LLM ended the request without a token ({reasons})")
    if output[: len(asked.ids)] != asked.ids or len(output) == len(asked.ids):
        raise EngineError(
            f"TensorRT-LLM answered {len(output)} tokens, which are not the {len(asked.ids)} of the input and new ones"
        )
    return output[len(asked.ids) :]


def salt_of(cache_salt: str) -> dict[str, int]:
    """Return the argument that keeps requests of different salts from sharing KV blocks."""
    if not cache_salt:
        return {}
    digest = blake2b(cache_salt.encode(), digest_size=8).digest()
    return {"cache_salt_id": int.from_bytes(digest) >> 1}  # 63 bits fit any 64-bit integer


def _output_config(api: Any, want: Want) -> Any:
    # Not its own log-probabilities: those are of what top-k and top-p leave, ours are the model's own.
    return api.OutputConfig(return_generation_logits=bool(want.logprobs or want.num_top))


def _num_equal(left: list[int], right: list[int]) -> int:
    """Return how many tokens two lists have in common from their beginning."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
