"""A gateway in a process of its own, which is started again when it has ended or hangs, and clients that call it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import httpx

from launcher import free_ports
from tests.support.client_threads import ClientThreads
from tests.support.clients import until

#: The probes of docker/k8s/base/gateway.yaml; that of liveness comes ten times as often.
PROBE_INTERVAL_S, PROBE_LIMIT_S, NUM_FAILURES, NUM_FAILURES_AT_START = 1.0, 3.0, 3, 60
START_LIMIT_S, STOP_LIMIT_S = 60.0, 20.0
#: No call takes longer: a gateway that hangs is killed long before, and a replica's loss costs its recovery at most.
CALL_LIMIT_S = 150.0


class SupervisedGateway:
    """A gateway and the stand-in of Kubernetes: restartPolicy Always, and the liveness probe of the gateway's pods.

    Kubernetes waits before a restart, up to five minutes after many; here the gateway starts at once. settings: flags.
    is_starting: no probe has succeeded yet. As in Kubernetes, one that hangs before is killed only after many probes.
    """

    def __init__(self, replicas: str, tokenizer: Path, **settings: Any) -> None:
        port = free_ports().health
        self.url, self.num_starts = f"http://127.0.0.1:{port}", 0
        flags = {"port": port, "replicas": replicas, "tokenizer": tokenizer, "log_level": "warning", **settings}
        words = itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(flags[name])) for name in flags)
        self._command = [sys.executable, "-m", "gateway", *words]
        self._process, self.is_starting = self._started(), True
        self._ended = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)

    def __enter__(self) -> SupervisedGateway:
        until(self.is_live, "the gateway", START_LIMIT_S)
        self._supervisor.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._supervisor.join(STOP_LIMIT_S)
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_LIMIT_S)

    @property
    def pid(self) -> int:
        """The process that was started last; it may have ended."""
        return self._process.pid

    def is_live(self) -> bool:
        """Return whether the gateway answers its liveness probe."""
        try:
            return httpx.get(f"{self.url}/health", timeout=PROBE_LIMIT_S).status_code == 200
        except httpx.TransportError:
            return False

    def serves(self) -> bool:
        """Return whether the gateway gives a token."""
        fields = {"model": "target", "prompt": "a", "max_tokens": 1, "stream": False, "extra_body": {}}
        return _ask(self.url, fields).outcome == "text"

    def _started(self) -> subprocess.Popen[bytes]:
        self.num_starts += 1
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def _supervise(self) -> None:
        num_failures = 0
        while not self._ended.wait(PROBE_INTERVAL_S):
            if self._process.poll() is not None:
                self._process, num_failures, self.is_starting = self._started(), 0, True
            elif self.is_live():
                num_failures, self.is_starting = 0, False
            else:
                num_failures += 1
                if num_failures == (NUM_FAILURES_AT_START if self.is_starting else NUM_FAILURES):
                    self._process.kill()


class Case(Protocol):
    """A request and the text that an undisturbed replica gave for it."""

    @property
    def text(self) -> str: ...

    def fields(self) -> dict[str, Any]:
        """Return the request as the client openai sends it."""


class Call(NamedTuple):
    """The result of one call.

    outcome: "text"; "error", an answer that says why; "cut", a connection that broke; "refused", one that was not made.
    began_s, ended_s: by time.monotonic().
    """

    outcome: str
    began_s: float
    ended_s: float
    detail: str = ""


@dataclass
class Callers(ClientThreads):
    """`number` clients that call a gateway until `stop`, every second call as a stream, without retries.

    pause_s: between two calls of a client. faults: wrong texts, and calls without an answer within CALL_LIMIT_S.
    """

    limit_s: ClassVar[float] = CALL_LIMIT_S
    what: ClassVar[str] = "a call through the gateway"
    url: str
    cases: Sequence[Case]
    number: int
    pause_s: float = 0.0
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def outcomes(self) -> Counter[str]:
        """Return how many calls had each outcome."""
        return Counter(call.outcome for call in list(self.calls))

    def _run(self, number: int) -> None:
        for turn in itertools.count():
            case = self.cases[(number + turn * self.number) % len(self.cases)]
            began_s = time.monotonic()
            answer = _ask(self.url, {**case.fields(), "stream": bool(turn % 2)})
            self.calls.append(Call(answer.outcome, began_s, time.monotonic(), answer.detail))
            is_right = answer.text == case.text if answer.outcome == "text" else case.text.startswith(answer.text)
            if answer.outcome == "unanswered" or not is_right:
                self.faults.append(f"through the gateway: got {answer}, wanted {case.text!r}"[:2000])
            if self._ended.wait(self.pause_s):
                return


@dataclass
class Answer:
    """What came of a call; without an end, its connection broke."""

    outcome: str = "cut"
    text: str = ""
    detail: str = ""

    def read(self, response: httpx.Response, is_stream: bool) -> None:
        """Read a response to its end."""
        if response.status_code != 200:
            self.outcome, self.detail = "error", f"{response.status_code} {response.read()[:300]!r}"
        elif is_stream:
            for line in response.iter_lines():
                self._take(line.removeprefix("data: "))
        else:
            self.outcome, self.text = "text", json.loads(response.read())["choices"][0]["text"]

    def _take(self, data: str) -> None:
        if data == "[DONE]" and self.outcome != "error":
            self.outcome = "text"
        elif data.startswith("{"):
            event = json.loads(data)
            self.text += "".join(choice["text"] for choice in event.get("choices", ()))
            if "error" in event:
                self.outcome, self.detail = "error", str(event["error"])[:300]


def _ask(url: str, fields: Mapping[str, Any]) -> Answer:
    """Ask for a text."""
    body = {name: value for name, value in fields.items() if name != "extra_body"} | fields["extra_body"]
    answer = Answer()
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=CALL_LIMIT_S) as response:
            answer.read(response, body["stream"])
    except httpx.TransportError as error:
        kinds = {httpx.ConnectError: "refused", httpx.TimeoutException: "unanswered"}
        answer.outcome = next((outcome for kind, outcome in kinds.items() if isinstance(error, kind)), "cut")
        answer.detail = repr(error)[:300]
    return answer
