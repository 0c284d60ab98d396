"""One sequence, from any number of replicas: if one fails, another continues the same text, token for token.

That works because a replica's noise depends only on seed and position (docs/losslessness.md): given the seed and the
ids received so far, any replica continues as the first one would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.errors import BadRequest, Busy, Failed, Unavailable
from gateway.metrics import Metrics
from gateway.replicas import FULL_PAUSE_S, InFlight, Replica, Replicas
from gateway.routing import affinity_key
from gateway.settings import Settings
from gateway.triton import (
    FirstTokenTimeout,
    Refused,
    ReplicaDraining,
    ReplicaError,
    ReplicaFull,
    ReplicaLost,
    StreamStalled,
)

#: The finish reason of requests on a replica that stops; the client did not cancel, so another replica continues.
CANCELLED = "cancelled"
#: How often a request may fail without a new token: one that breaks its replica must not break all of them.
MAX_TRIES = 5


@dataclass
class Delta:
    """What one response adds. finish_reason, num_input_tokens, num_cached_tokens: only in the last response.

    top_ids, top_logprobs: the most probable tokens of each position. drafted, accepted: draft tokens of each step.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    step_lengths: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, other: Delta) -> None:
        """Append another delta."""
        self.text += other.text
        for name in ("ids", "logprobs", "top_ids", "top_logprobs", "step_lengths", "drafted", "accepted", "steps"):
            getattr(self, name).extend(getattr(other, name))
        if other.finish_reason:
            self.finish_reason = other.finish_reason
            self.num_input_tokens = other.num_input_tokens
            self.num_cached_tokens = other.num_cached_tokens


class Refusal(BadRequest):
    """A replica found the request wrong; the message is the replica's, in terms of the server's inputs."""


@dataclass(frozen=True)
class Attempts:
    """The attempts since a request last got a token.

    num_failed: those that failed although the replica was neither full, draining nor late.
    since_s: when the request began to wait for a replica; time in which a replica was silent or full does not count.
    """

    tried: tuple[Replica, ...] = ()
    num_failed: int = 0
    error: ReplicaError | None = None
    since_s: float = field(default_factory=time.monotonic)

    def with_failure(self, replica: Replica, error: ReplicaError) -> Attempts:
        """Return the attempts with one more that failed."""
        tried = (*self.tried, replica)
        if isinstance(error, ReplicaDraining):
            return replace(self, tried=tried, error=error)
        is_failure = not isinstance(error, ReplicaFull | FirstTokenTimeout)
        return Attempts(tried, self.num_failed + is_failure, error)


@dataclass
class Progress:
    """What the sequences of one request share. has_begun: one of them has a token, so its reader may have seen it."""

    has_begun: bool = False


@dataclass
class Generation:
    """One sequence as it moves between replicas.

    inputs: those of the public model, including the seed. request_id: for logs. affinity: the client's name for
    requests that should go to one replica, "" = those whose prompts begin alike. progress: that of the request to which
    this sequence belongs. ids: the tokens received so far.
    Invariant: joined, the deltas equal those of a single replica that did not fail.
    """

    inputs: Mapping[str, Any]
    replicas: Replicas
    settings: Settings
    metrics: Metrics
    deadline_s: float
    request_id: str = ""
    affinity: str = ""
    progress: Progress = field(default_factory=Progress)
    ids: list[int] = field(default_factory=list)

    @property
    def _priority(self) -> int:
        """The request's level; the lowest goes first."""
        return self.inputs.get("priority") or 0

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield what each response adds, up to the one with a finish reason; raises ApiError."""
        attempts = Attempts()
        while True:
            try:
                replica = await self._next_replica(attempts)
            except (Busy, Failed, Unavailable):
                if not self.ids or time.monotonic() < self.deadline_s:
                    raise  # otherwise the reader keeps what came before the deadline
                yield Delta(finish_reason="deadline", num_input_tokens=len(self.inputs.get("input_ids", ())))
                return
            num_before, began_s = len(self.ids), time.monotonic()
            try:
                with replica.running() as request:
                    async with contextlib.aclosing(self._from(replica, request, attempts.tried)) as deltas:
                        async for delta in deltas:
                            yield delta
                            if delta.finish_reason:
                                self.replicas.report(replica, None, began_s)
                                return
                raise ReplicaLost("the stream ended before the text")
            except Refused as error:
                raise Refusal(str(error)) from None
            except ReplicaError as error:
                waits_for_room = isinstance(attempts.error, ReplicaFull) and replica in attempts.tried
                self.replicas.report(replica, error, began_s, self._priority, waits_for_room=waits_for_room)
                self._count(error, has_begun=len(self.ids) > num_before)
                attempts = (attempts if len(self.ids) == num_before else Attempts()).with_failure(replica, error)

    def _count(self, error: ReplicaError, has_begun: bool) -> None:
        """Count a text that a replica had begun, or a replica that was lost, as a failover; else that it refused."""
        is_failover = has_begun or isinstance(error, ReplicaLost | StreamStalled)
        (self.metrics.failovers if is_failover else self.metrics.refusals).labels(reason=error.reason).inc()

    async def _from(
        self, replica: Replica, request: InFlight, tried: Collection[Replica]
    ) -> AsyncGenerator[Delta, None]:
        """Yield what the responses of one replica add; raises ReplicaError."""
        limits = (self.settings.first_limit_s, self.settings.silence_limit_s)
        last_sign_s = functools.partial(self.replicas.last_sign_s, replica, request, tried, self._priority)
        stream = replica.client.stream(self._inputs(), *limits, self.request_id, last_sign_s)
        async with contextlib.aclosing(stream) as responses:
            async for outputs in responses:
                replica.note_response(request)
                if outputs.get("finish_reason") == CANCELLED:
                    raise ReplicaLost("the replica stopped the request")
                delta = to_delta(outputs)
                self.ids += delta.ids
                self.progress.has_begun |= bool(self.ids)
                yield delta

    def _inputs(self) -> dict[str, Any]:
        left_ms = max(int((self.deadline_s - time.monotonic()) * 1000), 1)
        continued = {"generated_ids": self.ids} if self.ids else {}
        return {**self.inputs, **continued, "timeout_ms": left_ms}

    async def _next_replica(self, attempts: Attempts) -> Replica:
        """Return the replica to try next; raises ApiError if the request should not be tried again.

        A new request is refused if all replicas are full. One that has begun waits for room, since its reader has seen
        it: that holds for a text that goes on and for a choice that has yet to begin.
        """
        error = attempts.error
        ready = [replica for replica in self.replicas.all.values() if replica.is_ready]
        if isinstance(error, ReplicaFull) and all(replica in attempts.tried for replica in ready):
            if not self.progress.has_begun:
                raise Busy(f"all replicas are full: {error}", retry_after_s=error.retry_after_s)
            if not error.is_for_all:  # the replicas do not rest, so this sequence must
                await asyncio.sleep(FULL_PAUSE_S)
        if not attempts.tried and not self.progress.has_begun:
            self.replicas.check_room(self._priority)
        if attempts.num_failed >= MAX_TRIES:
            raise Failed(f"the request failed {attempts.num_failed} times in a row, the last time: {error}")
        if found := await self._await_replica(attempts):
            return found
        if isinstance(error, ReplicaFull) and self.replicas.is_ready:
            raise Busy(f"no replica had room in time: {error}", retry_after_s=error.retry_after_s)
        raise Unavailable(f"no replica can be reached: {error or 'none is ready'}", retry_after_s=5)

    async def _await_replica(self, attempts: Attempts) -> Replica | None:
        """Wait for a replica that takes requests; return None if none does within the recovery limit.

        If the request has begun and the replicas are there, but full, only its deadline ends the wait.
        """
        key = affinity_key(self.inputs, self.affinity)
        may_wait_for_room = self.progress.has_begun and isinstance(attempts.error, ReplicaFull)
        since_s = time.monotonic() if may_wait_for_room else attempts.since_s
        while (left_s := min(since_s + self.settings.recovery_limit_s, self.deadline_s) - time.monotonic()) > 0:
            if found := await self.replicas.choose(key, attempts.tried, left_s, self._priority):
                return found
            if not (may_wait_for_room and self.replicas.is_ready):
                break
            since_s = time.monotonic()
        return None


def to_delta(outputs: Mapping[str, Any]) -> Delta:
    """Return one response's outputs as a delta."""
    ids, num_rows = outputs["output_ids"], len(outputs["output_ids"])
    delta = Delta(
        outputs["text_output"],
        ids,
        outputs.get("output_log_probs", []),
        _rows(outputs.get("top_ids", []), num_rows),
        _rows(outputs.get("top_log_probs", []), num_rows),
        outputs["step_lengths"],
        outputs.get("step_draft_tokens", []),
        outputs.get("step_accepted_tokens", []),
    )
    if "steps" in outputs:
        delta.steps = json.loads(outputs["steps"])["steps"]
    if "finish_reason" in outputs:
        delta.finish_reason = outputs["finish_reason"]
        delta.num_input_tokens = outputs["num_input_tokens"]
        delta.num_cached_tokens = json.loads(outputs["stats"])["num_cached_tokens"] if "stats" in outputs else 0
    return delta


def _rows(values: list[Any], num_rows: int) -> list[list[Any]]:
    width = len(values) // max(num_rows, 1)
    return [values[row * width : (row + 1) * width] for row in range(num_rows)] if width else []
