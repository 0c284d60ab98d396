"""One request of a client: its sequences run side by side and become one response or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import BadRequest, ContextTooLong
from gateway.fields import FIELD_OF_INPUT
from gateway.formats import ChatFormat, Format, token_counts
from gateway.generation import Delta, Generation, Refusal
from gateway.metrics import Metrics
from gateway.values import StreamOptions
from gateway.workers import off_loop

#: What the server's refusal of a prompt that is too long contains.
CONTEXT_LIMIT = "(context of the target, input "
_INPUT = re.compile(r"\binput (\w+)[,)]")
DONE = "data: [DONE]\n\n"


@dataclass(eq=False)
class Job:
    """One request.

    sequences: one for each choice of each prompt, a prompt's choices together. n: choices per prompt.
    echo: the prompt of each sequence, if the response repeats it. stream_options: whether a stream shows the usage.
    key_label: of the client's API key, for the metrics. ignored: the request's fields that change nothing.
    """

    sequences: Sequence[Generation]
    format: Format
    metrics: Metrics
    n: int = 1
    echo: Sequence[str] = ()
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    key_label: str = ""
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._received = [Delta() for _ in self.sequences]
        self._began_s = time.monotonic()

    async def response(self) -> dict[str, Any]:
        """Run to the end; return the whole response. Raises ApiError."""
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass
        return await off_loop(self.format.response, self._received, self.n)

    async def events(self) -> AsyncGenerator[str, None]:
        """Yield the events of a stream; raises ApiError."""
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for index, delta, is_first in deltas:
                for choice in self._choices(index, delta, is_first):
                    yield event(self.format.chunk([choice], **self._more()))
        if self.stream_options.include_usage:
            yield event(self.format.chunk([], **self.format.totals(self._received, self.n)))
        yield DONE

    def _more(self) -> dict[str, Any]:
        """Return what a chunk has beside its choice: the usage so far, or the metrics if no chunk follows."""
        if self.stream_options.include_usage:
            is_continuous = self.stream_options.continuous_usage_stats
            return {"usage": token_counts(self._received, self.n)} if is_continuous else {}
        is_last = all(delta.finish_reason for delta in self._received)
        return {"metrics": self.format.totals(self._received, self.n)["metrics"]} if is_last else {}

    def _choices(self, index: int, delta: Delta, is_first: bool) -> list[dict[str, Any]]:
        head = [self.format.first_choice(index)] if is_first and isinstance(self.format, ChatFormat) else []
        return [*head, self.format.delta_choice(index, delta)]

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta, bool], None]:
        """Yield for every response its sequence's index, its delta, and whether it is the sequence's first."""
        seen: set[int] = set()
        async for index, delta in _merged(self.sequences):
            if not seen:
                self.metrics.first_token_seconds.observe(time.monotonic() - self._began_s)
            if index not in seen and self.echo:
                delta.text = self.echo[index] + delta.text
            self._count(delta)
            self._received[index].add(delta)
            yield index, delta, index not in seen
            seen.add(index)

    def _count(self, delta: Delta) -> None:
        self.metrics.generation_tokens.labels(self.key_label).inc(len(delta.ids))
        self.metrics.prompt_tokens.labels(self.key_label).inc(delta.num_input_tokens)
        self.metrics.steps.inc(len(delta.accepted))
        self.metrics.drafted.inc(sum(delta.drafted))
        self.metrics.accepted.inc(sum(delta.accepted))


async def _merged(sequences: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of all sequences as they come; the first error ends them all."""
    if len(sequences) == 1:
        async for delta in _translated(sequences[0]):
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue(maxsize=len(sequences))
    tasks = [asyncio.create_task(_forward(index, sequence, queue)) for index, sequence in enumerate(sequences)]
    try:
        num_running = len(tasks)
        while num_running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    index: int, sequence: Generation, queue: asyncio.Queue[tuple[int, Delta | BaseException | None]]
) -> None:
    try:
        async for delta in _translated(sequence):
            await queue.put((index, delta))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))


async def _translated(sequence: Generation) -> AsyncGenerator[Delta, None]:
    """Yield a sequence's deltas; a replica's refusal becomes an error about a field of the request."""
    try:
        async for delta in sequence.deltas():
            yield delta
    except Refusal as refusal:
        text = str(refusal)
        match = _INPUT.search(text)
        kind = ContextTooLong if CONTEXT_LIMIT in text else BadRequest
        raise kind(text, FIELD_OF_INPUT.get(match[1], match[1]) if match else None) from None


def event(body: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
