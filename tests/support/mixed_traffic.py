"""Mixed traffic over gRPC and HTTP: requests that end, are cancelled, exceed their deadline, or are refused."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from tritonclient.utils import InferenceServerException

from auditor.settings import SETTINGS, inputs_of
from benchmarks.traffic import Prompt
from clients.generate import stream
from launcher import Server
from orchestrator.core.methods import METHODS, names_in
from tests.support.client_pool import ClientPool

NUM_AT_ONCE = 8
MAX_TOKENS = 40
BAD: Sequence[Mapping[str, Any]] = (
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_p": 2.0},
    {"max_tokens": 0},
    {"max_tokens": 1 << 20},
    {"speculation": "no such method"},
    {"speculation": "draft_model", "speculation_config": "{"},
    {"speculation": "draft_model", "speculation_config": '{"no_such_key": 1}'},
)


class Traffic:
    """Requests of all kinds from NUM_AT_ONCE clients; `outcomes` counts how they ended."""

    def __init__(self, server: Server, prompts: Sequence[Prompt], seed: int = 0) -> None:
        self.num_steps = 0
        self.outcomes: Counter[str] = Counter()
        self._server, self._prompts, self._seed = server, prompts, seed
        self._settings = [
            name
            for name, (method, _) in SETTINGS.items()
            if {METHODS[part].drafter for part in names_in(method)} <= {"", *server.drafters}
        ]
        self._lock = threading.Lock()
        self._goal = 0
        self._kinds: Sequence[Callable[[Any, random.Random], int]] = (
            *[self._finish] * 5,
            *[self._cancel] * 2,
            self._deadline,
            self._refused,
            self._http,
        )

    def run(self, num_steps: int) -> None:
        """Send requests until `num_steps` more steps have been seen."""
        self._goal = self.num_steps + num_steps
        self._seed += 1
        ClientPool(self._server.grpc_url, NUM_AT_ONCE).map(self._work, range(NUM_AT_ONCE))

    def _work(self, client: Any, number: int) -> None:
        rng = random.Random(f"{self._seed}, {number}")
        while self.num_steps < self._goal:
            kind = rng.choice(self._kinds)
            num_steps = kind(client, rng)
            with self._lock:
                self.num_steps += num_steps
                self.outcomes[kind.__name__.strip("_")] += 1

    def _inputs(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        """Return a prompt and the other inputs of a request."""
        text = rng.choice(self._prompts).text
        drawn = {"temperature": 0.8, "top_p": 0.95, "seed": rng.getrandbits(32)}
        stop = {"stop_words": ["return", "\n\n"]} if rng.random() < 0.3 else {}
        method = inputs_of(rng.choice(self._settings), text)
        length = {"max_tokens": rng.randint(1, MAX_TOKENS)}
        return text, {**method, **stop, **(drawn if rng.random() < 0.5 else {}), **length}

    def _finish(self, client: Any, rng: random.Random) -> int:
        """Let a request run to its end; an error fails the measurement."""
        text, inputs = self._inputs(rng)
        chunks = list(stream(client, text, limit_s=300, timeout_ms=300_000, **inputs))
        return sum(len(chunk.step_lengths) for chunk in chunks)

    def _cancel(self, client: Any, rng: random.Random) -> int:
        """Cancel after a few responses."""
        num_steps, patience = 0, rng.randint(0, 8)
        text, inputs = self._inputs(rng)
        with closing(stream(client, text, limit_s=300, **{**inputs, "max_tokens": 4 * MAX_TOKENS})) as chunks:
            for chunk in chunks:
                num_steps += len(chunk.step_lengths)
                if num_steps > patience:
                    break
        return num_steps

    def _deadline(self, client: Any, rng: random.Random) -> int:
        """Request more tokens than the deadline allows."""
        text, inputs = self._inputs(rng)
        inputs |= {"max_tokens": 8 * MAX_TOKENS, "timeout_ms": rng.randint(1, 150)}
        num_steps = 0
        with suppress(InferenceServerException):
            for chunk in stream(client, text, **inputs):
                num_steps += len(chunk.step_lengths)
        return num_steps

    def _refused(self, client: Any, rng: random.Random) -> int:
        """Send an invalid request, which must be refused."""
        try:
            text, inputs = self._inputs(rng)
            list(stream(client, text, **{**inputs, **rng.choice(BAD)}))
        except InferenceServerException:
            return 0
        raise AssertionError("a bad request was served")

    def _http(self, client: Any, rng: random.Random) -> int:
        """Stream over HTTP; close the connection early in half of the requests."""
        text, inputs = self._inputs(rng)
        body = json.dumps({"text_input": text, "stream": True, **inputs})
        address = self._server.http_url.removeprefix("http://")
        with closing(http.client.HTTPConnection(address, timeout=300)) as connection:
            connection.request("POST", "/v2/models/speculative/generate_stream", body)
            answer = connection.getresponse()
            if answer.status != 200:
                raise AssertionError(answer.read())
            lines = [answer.readline() for _ in range(3)] if rng.random() < 0.5 else answer.read().splitlines()
        return sum(line.startswith(b"data:") for line in lines)
