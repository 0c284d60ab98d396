"""Clients of a replica, without a gateway, that behave as clients do: well, impatiently, slowly, or wrongly.

Invariant: each visit ends within its limit, with one of OUTCOMES. A complete text is compared with that of an
undisturbed replica, and so is the beginning of every other one.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import grpc

from tests.support.client_threads import ClientThreads
from tests.support.clients import Answer, EventStream, Stream, Tensor, ask_unary, generate

#: How a visit ends: with the whole text; with its beginning, as intended; with an error that says why; refused, as it
#: must be; with a broken connection; without an answer within the client's limit.
OUTCOMES = ("text", "beginning", "error", "refused", "cut", "unanswered")
LIMIT_S = 40.0
BAD: Sequence[Mapping[str, Any]] = (
    {"temperature": float("nan")},
    {"top_p": 2.0},
    {"max_tokens": 1 << 20},
    {"speculation": "no such method"},
    {"speculation_config": "[" * 10_000},
    {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
    {"input_ids": Tensor("INT32", (1, 2), [-1, 1 << 30])},
    {"no_such_input": Tensor("INT32", (1, 1), [0])},
    {"text_input": Tensor("BYTES", (1, 1), [b"\xff\xfe"])},
)


class Case(Protocol):
    """A request and the text that an undisturbed replica gave for it."""

    @property
    def inputs(self) -> Mapping[str, Any]: ...

    @property
    def text(self) -> str: ...


class Visit(NamedTuple):
    """The result of one visit. replica: its number. began_s, ended_s: by time.monotonic()."""

    kind: str
    outcome: str
    replica: int
    began_s: float
    ended_s: float
    detail: str = ""


class Wrong(AssertionError):
    """A text that is not the reference's, or a bad request that was served."""


@dataclass
class Visitors(ClientThreads):
    """`number` clients on threads of their own, each of which makes one visit after another until `stop`.

    addresses: (gRPC, HTTP) of each replica. pause_s: between two visits of a client, on average.
    """

    limit_s: ClassVar[float] = 2 * LIMIT_S
    what: ClassVar[str] = "a visit"
    addresses: Sequence[tuple[str, str]]
    cases: Sequence[Case]
    number: int
    pause_s: float = 0.0
    visits: list[Visit] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def outcomes(self) -> Counter[tuple[str, str]]:
        """Return how many visits of each kind had each outcome."""
        return Counter((visit.kind, visit.outcome) for visit in list(self.visits))

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._ended.is_set():
            kind, visit = rng.choice(list(KINDS.items()))
            replica = rng.randrange(len(self.addresses))
            began_s, detail = time.monotonic(), ""
            try:
                outcome = visit(*self.addresses[replica], rng.choice(self.cases), rng)
            except Wrong as error:
                self.faults.append(f"{kind} at replica {replica}: {error}"[:2000])
                continue
            except (grpc.RpcError, OSError, AssertionError) as error:
                timed_out = isinstance(error, TimeoutError) or "no response within" in str(error)
                is_silent = timed_out or getattr(error, "code", lambda: None)() is grpc.StatusCode.DEADLINE_EXCEEDED
                outcome, detail = ("unanswered" if is_silent else "cut"), repr(error)[:300]
            self.visits.append(Visit(kind, outcome, replica, began_s, time.monotonic(), detail))
            self._ended.wait(rng.uniform(0.0, 2 * self.pause_s))


def _check(case: Case, text: str, whole: bool) -> None:
    if text != case.text if whole else not case.text.startswith(text):
        raise Wrong(f"{dict(case.inputs)}: got {text!r}, wanted {case.text!r}")


def _asked(grpc_url: str, case: Case, timeout_ms: int) -> str:
    """Wait for the end of a text or for an error; return the outcome."""
    answer = Answer()
    with Stream(grpc_url) as stream:
        stream.send("r", stream=True, timeout_ms=timeout_ms, **case.inputs)
        while not answer.error and not (answer.responses and answer.responses[-1].final):
            answer.responses.append(stream.receive(LIMIT_S))
    if answer.error:
        return "error"
    is_whole = answer.last["finish_reason"] == "length"
    _check(case, answer.text, is_whole)
    return "text" if is_whole else "beginning"


def _finish(grpc_url: str, http_url: str, case: Case, rng: random.Random) -> str:
    """Wait for the end of a text."""
    return _asked(grpc_url, case, int(LIMIT_S * 800))


def _unary(grpc_url: str, http_url: str, case: Case, rng: random.Random) -> str:
    """Ask the unary model, which answers once."""
    try:
        text = ask_unary(grpc_url, timeout_ms=int(LIMIT_S * 800), **case.inputs)["text_output"]
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            raise
        return "error" if error.details() else "cut"
    _check(case, text, whole=False)
    return "text" if text == case.text else "beginning"


def _cancel(grpc_url: str, http_url: str, case: Case, rng: random.Random) -> str:
    """Cancel after a few responses."""
    with Stream(grpc_url) as stream:
        stream.send("r", stream=True, timeout_ms=int(LIMIT_S * 800), **case.inputs)
        answer, patience = Answer(), rng.randint(1, 3)
        while len(answer.responses) < patience and not (answer.responses and answer.responses[-1].final):
            answer.responses.append(stream.receive(LIMIT_S))
        stream.cancel()
    if answer.error:
        return "error"
    _check(case, answer.text, whole=False)
    return "beginning"


def _late(grpc_url: str, http_url: str, case: Case, rng: random.Random) -> str:
    """Allow less time than the text needs."""
    return _asked(grpc_url, case, rng.randint(1, 200))


def _slow(grpc_url: str, http_url: str, case: Case, rng: random.Random) -> str:
    """Read slowly over HTTP; every second client hangs up in the middle."""
    events = EventStream(http_url, {**case.inputs, "stream": True, "timeout_ms": int(LIMIT_S * 800)})
    text, patience = "", rng.choice([5, 1 << 30])
    try:
        if events.status != 200:
            return "error"
        for number, event in enumerate(events):
            if "error" in event:
                return "error"
            text += event.get("text_output", "")
            if number >= patience:
                break
            time.sleep(rng.uniform(0.0, 0.1))
    finally:
        events.close()
    _check(case, text, whole=False)
    return "text" if text == case.text else "beginning"


def _malformed(grpc_url: str, http_url: str, case: Case, rng: random.Random) -> str:
    """Send what must be refused."""
    if rng.random() < 0.3:
        answer = generate(http_url, rng.choice([b"{", b"[]", b'{"text_input": 1', b"\xff" * 100, {"text_input": [[]]}]))
        if answer.status == 200:
            raise Wrong(f"a malformed body was served: {answer.body}")
        return "refused"
    with Stream(grpc_url) as stream:
        stream.send("r", **{**case.inputs, **rng.choice(BAD)})
        response = stream.receive(LIMIT_S)
    if not response.error:
        raise Wrong(f"a bad request was served: {response}")
    return "refused"


KINDS: Mapping[str, Callable[[str, str, Case, random.Random], str]] = {
    "finish": _finish,
    "unary": _unary,
    "cancel": _cancel,
    "deadline": _late,
    "slow": _slow,
    "malformed": _malformed,
}
