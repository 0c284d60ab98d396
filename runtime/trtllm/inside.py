"""Engines that draft by themselves (Medusa, EAGLE, ReDrafter, Lookahead): one request of the executor for a whole text.

The executor streams it, pass by pass; a step is told what has come since the last one.
"""

from __future__ import annotations

from typing import Any

from orchestrator.errors import RequestError
from orchestrator.types import Acceptance, Burst, Inside
from orchestrator.wire import StepRequest
from runtime.job import Job
from runtime.trtllm.desk import TargetDesk, new_tokens, salt_of, without_token
from runtime.trtllm.flights import Asked, Stream
from runtime.trtllm.library import lookahead_sizes
from runtime.trtllm.sampling import sampling_config

LEAST_SIZES, OFF = (2, 2, 1), (1, 1, 0)


class InsideDesk(TargetDesk):
    """Answers target steps with what a stream has brought; a step that wants no drafts is a request for one token.

    Law: at temperature 0, which is all that it serves, the text is the target's; a pass brings the drafts that were
    accepted in it and one token more.
    """

    def answer(self, job: Job[StepRequest], asked: Asked, results: list[Any]) -> Acceptance:
        """Return what the passes since the last call have brought."""
        inside = job.request.want.inside
        if asked.stream is None or inside is None:
            return Acceptance((), new_tokens(asked, results[-1])[0])
        tokens: list[int] = [token for result in results for token in result.output_token_ids[0]]
        if not tokens:
            raise without_token(results[-1])
        first = asked.stream.num_passes
        lengths = [length for result in results for length in _pass_lengths(asked.stream, result)]
        # The first pass of a request reads the prompt, and has no drafts.
        num_drafted = (len(lengths) - (not first)) * self._num_nodes(inside)
        asked.ids.extend(tokens)
        burst = Burst(self._capabilities.inside, tuple(tokens[:-1]), tuple(lengths), num_drafted)
        return Acceptance((), tokens[-1], burst=burst)

    def _asked(self, job: Job[StepRequest], ids: list[int], num_output: int) -> Asked:
        sampling, inside = job.request.sampling, job.request.want.inside
        length = min(inside.length, self._manifest.max_seq_len - len(ids)) if inside else 1
        request = self._api.Request(
            ids,
            length,
            streaming=inside is not None,
            sampling_config=sampling_config(self._api, sampling, len(ids), num_output),
            **(self._choices(inside) if inside else {}),
            **salt_of(job.delta.cache_salt),
        )
        stream = Stream((sampling, inside.choices, inside.sizes)) if inside else None
        return Asked(request, list(ids), [], stream)

    def _choices(self, inside: Inside) -> dict[str, Any]:
        """Return the arguments of Request that say how to draft; raises RequestError beyond what the engine can."""
        arguments: dict[str, Any] = {}
        if inside.sizes:
            self._check_sizes(inside.sizes)
            arguments["lookahead_config"] = self._api.LookaheadDecodingConfig(*inside.sizes)
        if inside.choices:
            self._check_num_choices(len(inside.choices))
            arguments["eagle_config"] = self._api.EagleConfig([list(path) for path in inside.choices])
        return arguments

    def _check_sizes(self, sizes: tuple[int, ...]) -> None:
        most = lookahead_sizes(self._manifest)
        fits = all(least <= asked <= end for least, asked, end in zip(LEAST_SIZES, sizes, most, strict=True))
        if not fits and sizes != OFF:
            raise RequestError(
                f"window, ngram and guesses must be in {_shown(LEAST_SIZES)} to {_shown(most)}, for which the engine "
                f"was built, or {_shown(OFF)}, off; got {_shown(sizes)} (input speculation_config)"
            )

    def _check_num_choices(self, num_choices: int) -> None:
        if num_choices > self._manifest.max_draft_len:
            raise RequestError(
                f"choices name {num_choices} nodes, the engine was built for at most {self._manifest.max_draft_len} "
                "(input speculation_config)"
            )

    def _num_nodes(self, inside: Inside) -> int:
        """Return how many drafted tokens a pass verifies: those asked for, else as many as the engine was built for."""
        if self._capabilities.inside == "lookahead":
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


def _shown(sizes: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, sizes))})"
