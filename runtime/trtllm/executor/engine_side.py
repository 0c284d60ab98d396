"""Engines that draft by themselves (Medusa, EAGLE, ReDrafter, Lookahead): one executor request for a whole text.

The executor streams the text pass by pass; a step gets the tokens that have come since the last one.
"""

from __future__ import annotations

from typing import Any

from orchestrator.core.deployment.engine_manifest import Manifest, lookahead_sizes
from orchestrator.core.deployment.engine_trees import lookahead_nodes, sizes_refusal, tree_limits
from orchestrator.core.errors import RequestError
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.types import Acceptance, EngineSpeculation, EngineSpeculationResult
from runtime.engine.calls import EngineCall
from runtime.trtllm.adapter import EngineRequest, Stream, generated_tokens, streamed_tokens
from runtime.trtllm.executor.adapters import TargetAdapter, salt_arguments
from runtime.trtllm.executor.library import eagle_config
from runtime.trtllm.executor.sampling import sampling_config


class EngineSideAdapter(TargetAdapter):
    """Answers target steps from a stream; a step without engine-side speculation is a request for one token.

    Invariant: at temperature 0 the text is the target's; each pass brings its accepted drafts and one more token.
    """

    _manifest: Manifest

    def from_result(self, call: EngineCall[StepRequest], request: EngineRequest, results: list[Any]) -> Acceptance:
        """Return the tokens of the passes since the last call."""
        speculation = call.request.options.engine_speculation
        if speculation is None:
            return Acceptance((), generated_tokens(request, results[-1], self._manifest.vocab_size)[0])
        num_nodes = self._num_nodes(speculation)
        return stream_acceptance(
            request, results, self._capabilities.engine_method, num_nodes, self._manifest.vocab_size
        )

    def _to_request(self, call: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        sampling, speculation = call.request.sampling, call.request.options.engine_speculation
        length = min(speculation.length, self._manifest.max_seq_len - len(ids)) if speculation else 1
        payload = self._api.Request(
            ids,
            length,
            streaming=speculation is not None,
            sampling_config=sampling_config(self._api, sampling, len(ids), num_output),
            **(self._draft_arguments(speculation, sampling) if speculation else {}),
            **salt_arguments(self._api, call.delta.cache_salt),
        )
        stream = Stream((sampling, speculation.choices, speculation.sizes), length) if speculation else None
        return EngineRequest(payload, list(ids), length, stream=stream)

    def _draft_arguments(self, speculation: EngineSpeculation, sampling: Sampling) -> dict[str, Any]:
        """Return the arguments of Request that say how to draft; raises RequestError beyond the engine's limits."""
        arguments: dict[str, Any] = {}
        if speculation.sizes:
            if refusal := sizes_refusal(speculation.sizes, lookahead_sizes(self._manifest)):
                raise RequestError(refusal)
            arguments["lookahead_config"] = self._api.LookaheadDecodingConfig(*speculation.sizes)
        if speculation.choices:
            limits = tree_limits("eagle", self._manifest.max_draft_len, self._manifest.plan.get("spec", {}))
            if refusal := limits.refusal(speculation.choices):
                raise RequestError(f"choices has {refusal} (input speculation_config)")
        epsilon = sampling.epsilon if sampling.rule is Rule.TYPICAL else None
        if speculation.choices or epsilon not in (None, self._capabilities.epsilon):
            arguments["eagle_config"] = eagle_config(self._api, self._manifest, speculation.choices, epsilon)
        return arguments

    def _num_nodes(self, speculation: EngineSpeculation) -> int:
        """Return how many draft tokens a pass verifies, by the request or else by the engine's build."""
        if self._capabilities.engine_method == "lookahead":
            return lookahead_nodes(*(speculation.sizes or lookahead_sizes(self._manifest)))
        return len(speculation.choices) or self._manifest.max_draft_len


def stream_acceptance(
    request: EngineRequest, results: list[Any], method: str, num_nodes: int, vocab_size: int
) -> Acceptance:
    """Return the tokens and passes of a stream's new results, and record in `request` that a call has received them.

    num_nodes: draft tokens that a pass verifies.
    """
    stream = request.stream
    assert stream is not None
    tokens = streamed_tokens(results, stream.room, vocab_size)
    stream.room -= len(tokens)
    request.ids.extend(tokens)
    # The first pass of a request reads the prompt and has no drafts.
    num_undrafted = int(stream.num_passes == 0)
    lengths = tuple(length for result in results for length in _pass_lengths(stream, result))
    num_drafted = (len(lengths) - num_undrafted) * num_nodes
    speculation = EngineSpeculationResult(method, tuple(tokens[:-1]), lengths, num_drafted)
    return Acceptance((), tokens[-1], engine_speculation=speculation)


def _pass_lengths(stream: Stream, result: Any) -> list[int]:
    """Return the tokens per pass of a result, which usually covers one pass; for several, only the sum is known."""
    num_tokens, num_before = len(result.output_token_ids[0]), stream.num_passes
    if not num_tokens:
        return []
    stream.num_passes = max(int(result.decoding_iter), num_before + 1)
    num_passes = min(stream.num_passes - num_before, num_tokens)
    return [num_tokens - num_passes + 1] + [1] * (num_passes - 1)
