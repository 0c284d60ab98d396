"""Engines that draft by themselves (Medusa, EAGLE, ReDrafter, Lookahead): one request of the executor for a whole text.

The executor streams it, pass by pass; a step is told what has come since the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.core.errors import RequestError
from orchestrator.core.types import Acceptance, EngineSpeculation, EngineSpeculationResult
from orchestrator.deployment.engine_manifest import lookahead_sizes
from orchestrator.deployment.engine_trees import sizes_refusal, tree_limits
from orchestrator.wire.target import StepRequest
from runtime.engine.calls import EngineCall
from runtime.trtllm.adapter import TargetAdapter, checked_tokens, new_tokens, salt_of, without_token
from runtime.trtllm.executor.sampling import sampling_config
from runtime.trtllm.in_flight import EngineRequest, Stream


class EngineSideAdapter(TargetAdapter):
    """Answers target steps with what a stream has brought; a step that wants no drafts is a request for one token.

    Invariant: at temperature 0, which is all that it serves, the text is the target's; a pass brings the drafts that were
    accepted in it and one token more.
    """

    def answer(self, job: EngineCall[StepRequest], asked: EngineRequest, results: list[Any]) -> Acceptance:
        """Return what the passes since the last call have brought."""
        inside = job.request.options.engine_speculation
        if asked.stream is None or inside is None:
            return Acceptance((), new_tokens(asked, results[-1], self._manifest.vocab_size)[0])
        tokens = self._streamed(asked.stream, results)
        first = asked.stream.num_passes
        lengths = [length for result in results for length in _pass_lengths(asked.stream, result)]
        # The first pass of a request reads the prompt, and has no drafts.
        num_drafted = (len(lengths) - (not first)) * self._num_nodes(inside)
        asked.ids.extend(tokens)
        burst = EngineSpeculationResult(
            self._capabilities.engine_method, tuple(tokens[:-1]), tuple(lengths), num_drafted
        )
        return Acceptance((), tokens[-1], engine_speculation=burst)

    def _streamed(self, stream: Stream, results: list[Any]) -> list[int]:
        """Return the tokens of results; raises EngineError for none, for one that is none, or beyond the text asked."""
        tokens: list[int] = [token for result in results for token in result.output_token_ids[0]]
        if not tokens:
            raise without_token(results[-1])
        checked_tokens(tokens, stream.room, self._manifest.vocab_size)
        stream.room -= len(tokens)
        return tokens

    def _asked(self, job: EngineCall[StepRequest], ids: list[int], num_output: int) -> EngineRequest:
        sampling, inside = job.request.sampling, job.request.options.engine_speculation
        length = min(inside.length, self._manifest.max_seq_len - len(ids)) if inside else 1
        request = self._api.Request(
            ids,
            length,
            streaming=inside is not None,
            sampling_config=sampling_config(self._api, sampling, len(ids), num_output),
            **(self._choices(inside) if inside else {}),
            **salt_of(job.delta.cache_salt),
        )
        stream = Stream((sampling, inside.choices, inside.sizes), length) if inside else None
        return EngineRequest(request, list(ids), length, stream=stream)

    def _choices(self, inside: EngineSpeculation) -> dict[str, Any]:
        """Return the arguments of Request that say how to draft; raises RequestError beyond what the engine can."""
        arguments: dict[str, Any] = {}
        if inside.sizes:
            if refusal := sizes_refusal(inside.sizes, lookahead_sizes(self._manifest)):
                raise RequestError(refusal)
            arguments["lookahead_config"] = self._api.LookaheadDecodingConfig(*inside.sizes)
        if inside.choices:
            self._check_choices(inside.choices)
            arguments["eagle_config"] = self._api.EagleConfig([list(path) for path in inside.choices])
        return arguments

    def _check_choices(self, choices: Sequence[tuple[int, ...]]) -> None:
        limits = tree_limits("eagle", self._manifest.max_draft_len, self._manifest.plan.get("spec", {}))
        if refusal := limits.refusal(choices):
            raise RequestError(f"choices has {refusal} (input speculation_config)")

    def _num_nodes(self, inside: EngineSpeculation) -> int:
        """Return how many drafted tokens a pass verifies: those asked for, else as many as the engine was built for."""
        if self._capabilities.engine_method == "lookahead":
            window, ngram, guesses = inside.sizes or lookahead_sizes(self._manifest)
            return max(ngram - 2, 0) + (window - 1 + guesses) * (ngram - 1)
        return len(inside.choices) or self._manifest.max_draft_len


def _pass_lengths(stream: Stream, result: Any) -> list[int]:
    """Return the tokens of each pass behind a result: as a rule there is one; of several, the sum alone is known."""
    num_tokens, num_before = len(result.output_token_ids[0]), stream.num_passes
    if not num_tokens:
        return []
    stream.num_passes = max(int(result.decoding_iter), num_before + 1)
    num_passes = min(stream.num_passes - num_before, num_tokens)
    return [num_tokens - num_passes + 1] + [1] * (num_passes - 1)
