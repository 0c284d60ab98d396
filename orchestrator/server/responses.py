"""The responses to one request: each sequence streamed under its index, or all sequences in one response."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.core.arrays import Tensors
from orchestrator.core.sampling_params import Rule
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.loop import SequenceState
from orchestrator.server.text import Chunk, FinishReason

Send = Callable[[Tensors], None]

#: The names of the rules that are reported with a warning.
RULE_NAMES = {Rule.TYPICAL: "typical (lossy)", Rule.ENGINE: "engine (a seed does not fix the text)"}


def _int32(*values: int) -> npt.NDArray[np.int32]:
    return np.array([values], np.int32)


def _text(value: str) -> npt.NDArray[np.object_]:
    return np.array([[value.encode()]], np.object_)


class Responses:
    """Sends the responses of one sequence.

    Invariant: the texts, ids and counts of all responses add up to those of the whole output; only the last response
    has the summary. Without `stream` there is exactly one response.
    """

    def __init__(self, request: GenerationRequest, sequence: SequenceState, send: Send) -> None:
        self._request = request
        self._sequence = sequence
        self._send = send
        self._sum_logprobs = 0.0
        self._unsent = Chunk("" if request.inputs.exclude_input_in_output else request.prompt_text, [], [])
        self._num_steps_sent = self._num_traced_sent = 0

    def emit(self, chunk: Chunk) -> None:
        """Add a chunk; send it now if the client streams, otherwise when the output has ended."""
        self._unsent.extend(chunk)
        self._sum_logprobs += sum(chunk.logprobs)
        if reason := self._sequence.output.finish:
            self._send(self._delta() | self._summary(reason))
        elif self._request.inputs.stream:
            self._send(self._delta())

    def finish(self, reason: FinishReason) -> None:
        """End the output for a reason outside the text, and send what is left."""
        self.emit(Chunk(self._sequence.output.close(reason), [], []))

    def _delta(self) -> Tensors:
        chunk, statistics, first = self._unsent, self._sequence.statistics, self._num_steps_sent
        self._unsent, self._num_steps_sent = Chunk("", [], []), len(statistics.step_lengths)
        tensors: Tensors = {
            # One dimension, as in TensorRT-LLM's postprocessing, whose clients read the text as output[0].
            "text_output": _text(chunk.text)[0],
            "output_ids": _int32(*chunk.ids),
            "num_output_tokens": _int32(len(chunk.ids)),
            "step_lengths": _int32(*statistics.step_lengths[first:]),
        }
        if self._request.inputs.return_stats:
            tensors["step_draft_tokens"] = _int32(*statistics.step_drafts[first:])
            tensors["step_accepted_tokens"] = _int32(*statistics.step_accepted[first:])
        if self._request.inputs.stream_steps and self._sequence.trace:
            new_steps = self._sequence.trace.steps[self._num_traced_sent :]
            self._num_traced_sent += len(new_steps)
            tensors["steps"] = _text(json.dumps({"steps": new_steps}))
        if self._request.options.logprobs:
            tensors["output_log_probs"] = np.array([[chunk.logprobs]], np.float32)
            tensors["cum_log_probs"] = np.array([[self._sum_logprobs]], np.float32)
        if num_top := self._request.options.num_top:
            tensors["top_ids"] = np.array(chunk.top_ids, np.int32).reshape(1, -1, num_top)
            tensors["top_log_probs"] = np.array(chunk.top_logprobs, np.float32).reshape(1, -1, num_top)
        return tensors

    def _summary(self, reason: FinishReason) -> Tensors:
        statistics, sampling = self._sequence.statistics, self._request.sampling
        rule = RULE_NAMES.get(sampling.rule, sampling.rule.value)
        if sampling.rule is Rule.ENGINE and sampling.greedy:
            rule = sampling.rule.value  # at temperature 0 the text is fixed
        tensors: Tensors = {
            "finish_reason": _text(reason.value),
            "rule": _text(rule),
            "num_input_tokens": _int32(len(self._request.prompt)),
            "num_steps": _int32(statistics.num_steps),
            "acceptance_rate": np.array([[statistics.acceptance_rate]], np.float32),
            "total_accepted_draft_tokens": _int32(statistics.num_accepted_tokens),
            "total_draft_tokens": _int32(statistics.num_draft_tokens),
        }
        if self._request.inputs.return_stats:
            stats = {"method": self._request.plan.method, "rule": rule, **statistics.to_dict()}
            tensors["stats"] = _text(json.dumps(stats))
        if self._request.inputs.return_steps and self._sequence.trace:
            tensors["steps"] = _text(json.dumps(self._sequence.trace.to_dict()))
        return tensors


#: Outputs that are the same for all sequences of a request.
_SHARED = ("num_input_tokens", "rule")


class ResponseMerger:
    """Sends the responses of all sequences of one request; any thread may call it.

    Invariant: with `is_streamed`, every response names its sequence (`sequence_index`); otherwise one response has all
    sequences in order. A request for one sequence gets the responses of that sequence unchanged.
    """

    def __init__(self, num_sequences: int, is_streamed: bool, send: Send) -> None:
        self._num_sequences = num_sequences
        self._is_streamed = is_streamed
        self._send = send
        self._last: dict[int, Tensors] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def sender(self, index: int) -> Send:
        """Return the function that sends the responses of sequence `index`."""
        return self._send if self._num_sequences == 1 else lambda tensors: self._forward(index, tensors)

    def close(self) -> bool:
        """Drop everything that sequences send from now on; return True when all of them have finished."""
        with self._lock:
            self._is_closed = True
            return len(self._last) == self._num_sequences

    def _forward(self, index: int, tensors: Tensors) -> None:
        with self._lock:
            if self._is_closed:
                return
            if not self._is_streamed or "finish_reason" in tensors:
                self._last[index] = tensors
            if self._is_streamed:
                self._send(tensors | {"sequence_index": np.array([[index]], np.int32)})
            elif len(self._last) == self._num_sequences:
                self._send(joined([self._last[i] for i in range(self._num_sequences)]))


def joined(responses: Sequence[Tensors]) -> Tensors:
    """Return one response for several sequences: lists concatenated, log probabilities padded to rows of one length."""
    return {name: _joined(name, [tensors[name] for tensors in responses]) for name in responses[0]}


def _joined(name: str, values: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if name in _SHARED:
        return values[0]
    if name == "text_output":
        return np.concatenate([value.reshape(1, -1) for value in values], axis=1)
    if name == "output_log_probs":
        longest = max(value.shape[2] for value in values)
        values = [np.pad(value, ((0, 0), (0, 0), (0, longest - value.shape[2]))) for value in values]
    return np.concatenate(values, axis=1)
