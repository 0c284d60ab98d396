"""A target step as part of one streamed generation of the LLM API."""

from __future__ import annotations

from typing import Any

import numpy as np
from smg_grpc_proto.generated import trtllm_service_pb2 as pb

from orchestrator.core.deployment.capabilities import Capabilities
from orchestrator.core.deployment.engine_manifest import LlmManifest
from orchestrator.core.errors import RequestError
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Acceptance, EngineSpeculationResult, StepOptions
from runtime.engine.calls import EngineCall
from runtime.trtllm.adapter import Adapter, EngineRequest, Stream, streamed_tokens


class LlmAdapter(Adapter[StepRequest]):
    """Answers target steps from a stream, or with one token when a step has no engine-side speculation.

    Invariant: at temperature 0 the text is the target's. How many drafts a pass verifies is fixed when the server
    starts; a request cannot choose.
    """

    def __init__(self, manifest: LlmManifest, capabilities: Capabilities) -> None:
        self._manifest = manifest
        self._capabilities = capabilities

    def to_request(self, call: EngineCall[StepRequest], ids: list[int]) -> EngineRequest:
        """Return the GenerateRequest; raises RequestError for a step that the LLM API cannot serve.

        Only the generation loop ends a text, so the end of sequence is ignored.
        """
        request, speculation = call.request, call.request.options.engine_speculation
        self._check(call, ids)
        length = min(speculation.length if speculation else 1, self._manifest.max_seq_len - len(ids))
        payload = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_token_ids=ids),
            sampling_config=_sampling_config(request.sampling),
            output_config=_output_config(request.options),
            max_tokens=length,
            streaming=speculation is not None,
            ignore_eos=True,
        )
        options = (request.sampling, request.options.logprobs, request.options.num_top)
        return EngineRequest(payload, list(ids), length, stream=Stream(options, length) if speculation else None)

    def from_result(self, call: EngineCall[StepRequest], request: EngineRequest, results: list[Any]) -> Acceptance:
        """Return the tokens of the passes since the last call, or the one token."""
        stream, options = request.stream, call.request.options
        most = stream.room if stream else request.length
        tokens = streamed_tokens(results, most, self._manifest.vocab_size)
        logprobs = [entry for result in results for entry in result.logprobs] if _wants_logprobs(options) else []
        speculation = None
        if stream:
            request.ids.extend(tokens)
            lengths = _pass_lengths(stream, request.length, results)
            num_drafted = self._num_drafted(stream, lengths, results[-1])
            speculation = EngineSpeculationResult(self._manifest.method, tuple(tokens[:-1]), lengths, num_drafted)
        return Acceptance((), tokens[-1], engine_speculation=speculation, **_logprob_arrays(logprobs, options.num_top))

    def _check(self, call: EngineCall[StepRequest], ids: list[int]) -> None:
        """Raise RequestError for a step that the LLM API cannot serve."""
        request, manifest = call.request, self._manifest
        if refusal := self._capabilities.refusal(request.sampling, request.options):
            raise RequestError(refusal)
        speculation = request.options.engine_speculation
        if speculation and (speculation.choices or speculation.sizes):
            raise RequestError("the LLM API drafts as the server was started; a request cannot choose a tree or sizes")
        if call.delta.cache_salt and manifest.block_reuse:
            raise RequestError(
                "cache_salt keeps the KV blocks of some requests from others: trtllm-serve does not hand it on (input "
                "cache_salt; block_reuse = false in the engines' file shares no blocks at all)"
            )
        if len(ids) > manifest.max_input_len:
            raise RequestError(
                f"the text so far has {len(ids)} tokens, the LLM API was started for at most {manifest.max_input_len}"
            )

    def _num_drafted(self, stream: Stream, lengths: tuple[int, ...], last: Any) -> int:
        """Return the draft tokens of these passes: by the server's count where it has one, else all that fit a pass.

        The first pass of a request reads the prompt and has no drafts.
        """
        first = int(stream.num_passes == 0)
        stream.num_passes += len(lengths)
        num_drafted = (len(lengths) - first) * self._manifest.max_draft_len
        if last.num_drafted:
            num_drafted = max(last.num_drafted - stream.num_drafted, 0)
        stream.num_drafted += num_drafted
        return num_drafted


def _pass_lengths(stream: Stream, length: int, results: list[Any]) -> tuple[int, ...]:
    """Return the tokens of each pass: a message brings one pass, unless the server's count says that it brought more.

    Every token that is no accepted draft began a pass.
    """
    lengths = [len(result.output_token_ids[0]) for result in results if result.output_token_ids[0]]
    stream.room -= sum(lengths)
    if results[-1].num_drafted:
        num_passes = length - stream.room - results[-1].num_accepted - stream.num_passes
        more = min(num_passes - len(lengths), lengths[-1] - 1)
        if more > 0:
            lengths[-1:] = [lengths[-1] - more, *[1] * more]
    return tuple(lengths)


def _sampling_config(sampling: Sampling) -> pb.SamplingConfig:
    """Return the sampler's settings; without a top_k of 1 the server draws at temperature 1."""
    if sampling.greedy:
        return pb.SamplingConfig(beam_width=1, top_k=1)
    return pb.SamplingConfig(
        beam_width=1,
        temperature=sampling.temperature,
        top_k=sampling.top_k or None,
        top_p=sampling.top_p,
        seed=sampling.seed,
    )


def _output_config(options: StepOptions) -> pb.OutputConfig:
    """Return what to answer beside tokens; the server takes no count of 0 for the sampled token alone."""
    return pb.OutputConfig(logprobs=max(options.num_top, 1)) if _wants_logprobs(options) else pb.OutputConfig()


def _wants_logprobs(options: StepOptions) -> bool:
    return bool(options.logprobs or options.num_top)


def _logprob_arrays(entries: list[Any], num_top: int) -> dict[str, Any]:
    """Return the log probabilities of the tokens, and of the `num_top` likeliest at each, the best first."""
    if not entries:
        return {}
    arrays: dict[str, Any] = {"logprobs": np.array([entry.logprob for entry in entries], np.float64)}
    if num_top:
        ranked = [sorted(entry.top_logprobs, key=lambda each: -each.logprob)[:num_top] for entry in entries]
        arrays["top_ids"] = np.array([[each.token_id for each in row] for row in ranked], np.int32)
        arrays["top_logprobs"] = np.array([[each.logprob for each in row] for row in ranked], np.float64)
    return arrays
