"""Several sequences of one request: each streamed under its number, or all in one response."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.core.sampling_params import Rule
from orchestrator.generation.loop import Progress
from orchestrator.generation.statistics import told
from orchestrator.generation.text import Chunk, FinishReason, Output
from orchestrator.requests.generation_request import GenerationRequest
from orchestrator.wire.tensors import Tensors

#: A lossy rule says so wherever it is named, and so does one under which a seed does not fix the text.
RULE_NAMES = {Rule.TYPICAL: "typical (lossy)", Rule.ENGINE: "engine (a seed does not fix the text)"}


def _int32(*values: int) -> npt.NDArray[np.int32]:
    return np.array([values], np.int32)


def _text(value: str) -> npt.NDArray[np.object_]:
    return np.array([[value.encode()]], np.object_)


class Responses:
    """Sends the responses of one sequence.

    Invariant: joined, the texts, ids and counts of all responses are those of the whole output; the summary
    comes on the last one alone. Without `stream` there is exactly one.
    """

    def __init__(
        self, job: GenerationRequest, output: Output, progress: Progress, send: Callable[[Tensors], None]
    ) -> None:
        self._job = job
        self._output = output
        self._progress = progress
        self._send = send
        self._sum_logprobs = 0.0
        self._held = Chunk(job.prompt_text if job.repeat_prompt else "", [], [])
        self._num_steps_told = 0

    def emit(self, chunk: Chunk) -> None:
        """Take one step's chunk; send it now when streaming, and everything when the output has ended."""
        self._held.text += chunk.text
        self._held.ids += chunk.ids
        self._held.logprobs += chunk.logprobs
        self._held.top_ids += chunk.top_ids
        self._held.top_logprobs += chunk.top_logprobs
        self._sum_logprobs += sum(chunk.logprobs)
        if self._output.finish:
            self._send(self._delta() | self._summary(self._output.finish))
        elif self._job.stream:
            self._send(self._delta())

    def finish_late(self) -> None:
        """End the output at its deadline, with what there is."""
        self.emit(Chunk(self._output.close(FinishReason.DEADLINE), [], []))

    def _delta(self) -> Tensors:
        held, lengths = self._held, self._progress.tally.step_lengths[self._num_steps_told :]
        self._held, self._num_steps_told = Chunk("", [], []), self._num_steps_told + len(lengths)
        tensors: Tensors = {
            "text_output": _text(held.text),
            "output_ids": _int32(*held.ids),
            "num_output_tokens": _int32(len(held.ids)),
            "step_lengths": _int32(*lengths),
        }
        if self._job.options.logprobs:
            tensors["output_log_probs"] = np.array([[held.logprobs]], np.float32)
            tensors["cum_log_probs"] = np.array([[self._sum_logprobs]], np.float32)
        if num_top := self._job.options.num_top:
            tensors["top_ids"] = np.array(held.top_ids, np.int32).reshape(1, -1, num_top)
            tensors["top_log_probs"] = np.array(held.top_logprobs, np.float32).reshape(1, -1, num_top)
        return tensors

    def _summary(self, reason: FinishReason) -> Tensors:
        tally = self._progress.tally
        tensors: Tensors = {
            "finish_reason": _text(reason.value),
            "rule": _text(self._rule),
            "num_input_tokens": _int32(len(self._job.prompt)),
            "num_steps": _int32(tally.num_steps),
            "acceptance_rate": np.array([[tally.acceptance_rate]], np.float32),
            "total_accepted_draft_tokens": _int32(tally.num_accepted_tokens),
            "total_draft_tokens": _int32(tally.num_draft_tokens),
        }
        if self._job.return_stats:
            tensors["stats"] = _text(json.dumps(self._stats()))
        if self._progress.trace:
            tensors["steps"] = _text(json.dumps(self._progress.trace.told()))
        return tensors

    @property
    def _rule(self) -> str:
        rule, greedy = self._job.sampling.rule, self._job.sampling.greedy
        return rule if rule is Rule.ENGINE and greedy else RULE_NAMES.get(rule, rule)

    def _stats(self) -> dict[str, Any]:
        """Return what is told when asked for."""
        progress = self._progress
        return {
            "method": self._job.plan.method,
            "rule": self._rule,
            "time_to_first_token_ms": 1e3 * progress.first_token_s,
            "total_ms": 1e3 * (time.monotonic() - progress.began_s),
            "forward_ms": progress.forward_us / 1e3,
            "num_cached_tokens": progress.num_cached_tokens,
            "requests_per_pass": progress.num_in_pass / max(progress.tally.num_steps, 1),
            **told(progress.tally),
        }


Send = Callable[[Tensors], None]
#: What is said once, whatever the number of sequences.
_SHARED = ("num_input_tokens", "rule")


class ResponseMerger:
    """Sends what the sequences of one request have to say, from any thread.

    Invariant: streamed, every response names its sequence (`sequence_index`); otherwise one response has them all, in order.
    A request for one sequence gets what that sequence sends.
    """

    def __init__(self, num_sequences: int, stream: bool, send: Send) -> None:
        self._num_sequences = num_sequences
        self._stream = stream
        self._send = send
        self._last: dict[int, Tensors] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def sender(self, index: int) -> Send:
        """Return what sequence `index` sends with."""
        return self._send if self._num_sequences == 1 else lambda tensors: self._say(index, tensors)

    def close(self) -> bool:
        """Send nothing any more, whatever a sequence still has to say; True when all have said their last."""
        with self._lock:
            self._is_closed = True
            return len(self._last) == self._num_sequences

    def _say(self, index: int, tensors: Tensors) -> None:
        with self._lock:
            if self._is_closed:
                return
            if not self._stream or "finish_reason" in tensors:
                self._last[index] = tensors
            if self._stream:
                self._send(tensors | {"sequence_index": np.array([[index]], np.int32)})
            elif len(self._last) == self._num_sequences:
                self._send(joined([self._last[i] for i in range(self._num_sequences)]))


def joined(said: Sequence[Tensors]) -> Tensors:
    """Return one response of several: lists one behind the other, log-probabilities as rows of one length."""
    return {name: _joined(name, [tensors[name] for tensors in said]) for name in said[0]}


def _joined(name: str, values: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if name in _SHARED:
        return values[0]
    if name == "output_log_probs":
        longest = max(value.shape[2] for value in values)
        values = [np.pad(value, ((0, 0), (0, 0), (0, longest - value.shape[2]))) for value in values]
    return np.concatenate(values, axis=1)
