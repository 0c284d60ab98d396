"""Several sequences of one request: each streamed under its number, or all in one response."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from orchestrator.tensors import Tensors

Send = Callable[[Tensors], None]
#: What is said once, whatever the number of sequences.
_SHARED = ("num_input_tokens", "rule")


class Together:
    """Sends what the sequences of one request have to say, from any thread.

    Law: streamed, every response names its sequence (`sequence_index`); otherwise one response has them all, in order.
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
