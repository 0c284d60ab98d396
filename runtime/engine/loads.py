"""The loads of passes and their times: what each pass computed, so that the costs of passes can be learnt."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from orchestrator.core.types import PassLoad
from runtime.engine.kv.batch import Segment
from runtime.engine.verify import VerifyResult
from runtime.models.native.decoding import DecodedStep


def load_of(
    planned: Sequence[tuple[object, Segment]],
    results: Sequence[VerifyResult],
    is_atypical: bool,
    num_in_separate_pass: int,
) -> PassLoad:
    """Return the load of a pass over these segments; results: those of the steps that it completed."""
    segments = [segment for _, segment in planned]
    num_nodes = sum(segment.tree.num_nodes for segment in segments)
    num_steps, num_accepted = max(len(results), 1), sum(len(result.accepted.path) for result in results)
    return PassLoad(
        sum(segment.last - segment.first for segment in segments) + num_nodes,
        num_steps,
        1.0 + num_nodes / num_steps,
        1.0 + num_accepted / num_steps,
        is_atypical,
        sum(segment.last for segment in segments),
        sum(map(_num_row_kv_tokens, segments)),
        num_in_separate_pass,
    )


def loads_of(
    passes: Iterable[Sequence[DecodedStep]], context_lens: list[int], num_in_separate_pass: int
) -> Iterator[PassLoad]:
    """Yield the load of each pass of a burst, from the steps of all sequences. context_lens: before the first pass."""
    for steps in passes:
        rows, tokens = [step.draft.tree.num_nodes + 1 for step in steps], [len(step.path) + 1 for step in steps]
        yield PassLoad(
            sum(rows),
            len(steps),
            sum(rows) / len(steps),
            sum(tokens) / len(steps),
            num_kv_tokens=sum(context_lens),
            num_row_kv_tokens=sum(count * length for count, length in zip(rows, context_lens, strict=True)),
            num_in_separate_pass=num_in_separate_pass,
        )
        context_lens = [length + more for length, more in zip(context_lens, tokens, strict=True)]


def _num_row_kv_tokens(segment: Segment) -> int:
    """Return how many tokens the rows attend to in all: a context row to those up to its own, a node to all of them."""
    num_rows = segment.last - segment.first
    return num_rows * segment.first + num_rows * (num_rows + 1) // 2 + segment.tree.num_nodes * segment.last


class ForwardTimer:
    """Times a forward pass, which begins when this is made.

    On a GPU by events, so that the host launches the verification while the pass still runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.began_s = self._end_s = time.monotonic()
        self._began = self._recorded()
        self._ended: torch.cuda.Event | None = None

    def stop(self) -> None:
        """Note that all operations of the pass have been launched; on a CPU they have ended."""
        self._end_s, self._ended = time.monotonic(), self._recorded()

    def elapsed_s(self) -> float:
        """Return the seconds of the pass, for whose end the host waits if it has not come yet."""
        if self._began is None or self._ended is None:
            return self._end_s - self.began_s
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) / 1e3

    def _recorded(self) -> torch.cuda.Event | None:
        return self._stream.record_event(torch.cuda.Event(enable_timing=True)) if self._stream else None
