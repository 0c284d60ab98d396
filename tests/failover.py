"""`python -m tests.failover`: many streams through the gateway while replicas are killed; every text stays the same.

Replicas of a tiny random target in float64 are killed with SIGKILL, each as soon as the one before is back, while
readers stream without a pause. Each response is compared with that of a replica that nobody disturbed, asked directly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

import launcher
from tests.support.clients import Stream, until
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.tiny_models import make_tiny_target

METHODS = ("none", "prompt_lookup", "suffix", "lookahead", "jacobi", "prompt_lookup+suffix")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 1.2, "top_k": 8, "return_log_probs": True},
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LIMIT_S = 240.0
#: Tokens that the readers get between two kills, so that each kill meets streams that have begun.
TOKENS_BETWEEN = 300


@dataclass(frozen=True)
class Case:
    """One request and the response of an undisturbed replica. inputs: of the public model."""

    inputs: dict[str, Any]
    text: str
    ids: list[int]
    logprobs: list[float]

    def fields(self) -> dict[str, Any]:
        """Return the request as the client openai sends it."""
        ours = ("speculation", "ignore_eos", "top_k", "repetition_penalty")
        same = ("max_tokens", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty")
        return {
            "model": "target",
            "prompt": self.inputs["text_input"],
            "logprobs": 0 if self.inputs.get("return_log_probs") else None,
            **{name: self.inputs[name] for name in same if name in self.inputs},
            "extra_body": {name: self.inputs[name] for name in ours if name in self.inputs}
            | {"return_token_ids": True},
        }


def make_cases(url: str, num_cases: int, max_tokens: int) -> list[Case]:
    """Ask a replica directly, without a gateway, for the text of each case."""
    choose, requests = random.Random(7), []
    for number in range(num_cases):
        phrase = "".join(choose.choices(LETTERS, k=6))
        request = {
            "text_input": phrase + "".join(choose.choices(LETTERS, k=4)) + phrase,
            "speculation": METHODS[number % len(METHODS)],
            "seed": number,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **SAMPLINGS[number % len(SAMPLINGS)],
        }
        requests.append(request)
    return ask_all(url, requests)


def ask_all(url: str, requests: Sequence[dict[str, Any]], **instead: Any) -> list[Case]:
    """Ask a replica directly for the text of each request. instead: inputs that replace those of the request."""
    cases, names = [], [str(number) for number in range(len(requests))]
    with Stream(url) as stream:
        for name, inputs in zip(names, requests, strict=True):
            stream.send(name, stream=True, **{"timeout_ms": 600_000, **inputs, **instead})
        answers = stream.answers(*names)
    for name, inputs in zip(names, requests, strict=True):
        answer = answers[name]
        assert not answer.error, answer.error
        logprobs = [value for part in answer.parts for value in part.get("output_log_probs", [])]
        cases.append(Case(inputs, answer.text, answer.ids, logprobs))
    return cases


@dataclass
class Readers:
    """Clients that stream one case after the other until they are told to stop, each finishing its last.

    pause_s: between two streams of a client.
    """

    url: str
    cases: Sequence[Case]
    num_readers: int
    pause_s: float = 0.0
    num_tokens: int = 0
    num_running: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        """Start reading on a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let every reader finish its stream, and wait for them."""
        self._ended.set()
        self._thread.join(LIMIT_S)
        if self._thread.is_alive():
            self.faults.append(f"a stream did not end within {LIMIT_S:g} s")

    async def _run(self) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, timeout=LIMIT_S) as client:
            await asyncio.gather(*(self._read(client, first) for first in range(self.num_readers)))

    async def _read(self, client: openai.AsyncOpenAI, number: int) -> None:
        while True:
            case = self.cases[number % len(self.cases)]
            self.num_running += 1
            try:
                self._compare(case, await self._stream(client, case))
            except openai.APIError as error:
                self.outcomes["error"] += 1
                self.faults.append(f"case {case.inputs}: {error!r} from {error.__cause__!r}")
            self.num_running -= 1
            number += self.num_readers
            if self._ended.is_set():
                return
            await asyncio.sleep(self.pause_s)

    async def _stream(self, client: openai.AsyncOpenAI, case: Case) -> dict[str, Any]:
        got: dict[str, Any] = {"text": "", "ids": [], "logprobs": [], "finish_reason": None, "usage": None}
        stream = await client.completions.create(stream=True, stream_options={"include_usage": True}, **case.fields())
        async for chunk in stream:
            for choice in chunk.choices:
                got["text"] += choice.text
                got["ids"] += choice.token_ids
                got["logprobs"] += choice.logprobs.token_logprobs if choice.logprobs else []
                got["finish_reason"] = choice.finish_reason
                self.num_tokens += len(choice.token_ids)
            got["usage"] = chunk.usage or got["usage"]
        return got

    def _compare(self, case: Case, got: dict[str, Any]) -> None:
        wanted = {"text": case.text, "ids": case.ids, "logprobs": case.logprobs, "finish_reason": "length"}
        wrong = [name for name, value in wanted.items() if got[name] != value]
        if got["usage"] is None or got["usage"].completion_tokens != len(case.ids):
            wrong.append("usage")
        self.outcomes["different" if wrong else "equal"] += 1
        if wrong:
            self.faults.append(f"case {case.inputs}: {wrong}; got {got}, wanted {wanted}")


@dataclass
class Result:
    """What a run saw.

    kills: how each replica was lost, in order. num_met: streams under way at each kill. num_cut: drains that ended with
    streams under way, which the gateway has moved.
    """

    kills: list[str]
    num_met: list[int]
    num_cut: int
    outcomes: Counter[str]
    faults: list[str]
    num_failovers: int
    seconds: float

    def line(self) -> str:
        """Return the run in one line."""
        outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(self.outcomes.items()))
        return (
            f"streams: {outcomes}; {len(self.kills)} kills ({', '.join(self.kills)}), each under "
            f"{min(self.num_met)}-{max(self.num_met)} streams; {self.num_failovers} streams moved; {self.num_cut} drains "
            f"reached their limit; {self.seconds:.0f} s"
        )


def kill_server(server: launcher.Server) -> None:
    """Kill a replica with everything that belongs to it; the launcher starts it again."""
    pid = pid_of(server, "tritonserver")
    os.killpg(pid, signal.SIGKILL)
    wait_for_another(server, "tritonserver", pid)


def kill_public_model(server: launcher.Server) -> None:
    """Kill the process of the public model alone: Triton leaves its streams open and silent; the launcher reloads it.

    Where Triton aborts after that (triton#8882), the launcher starts the whole server again.
    """
    pid = pid_of(server, "speculative")
    os.kill(pid, signal.SIGKILL)
    wait_for_another(server, "speculative", pid)


def wait_for_another(server: launcher.Server, name: str, pid: int | None) -> None:
    """Wait until another process has taken the place of one, and the server serves; fail once the launcher gives up."""

    def is_back() -> bool:
        assert server.failure() is None, server.failure()
        return server.why_not_ready() is None and pid_of(server, name) != pid

    until(is_back, f"another {name}", LIMIT_S)


def pid_of(server: launcher.Server, name: str) -> int | None:
    """Return the id of a living process of a server by its model's name, or "tritonserver"."""
    return next((pid for pid, of in server.pids().items() if of == name), None)


def stop_server(server: launcher.Server) -> None:
    """Stop a replica as a supervisor does, with SIGTERM, and start it again."""
    server.stop()
    server.start()


def drain_server(server: launcher.Server) -> bool:
    """Restart a replica as a rolling update does; return whether it finished before its limit what it had accepted."""
    has_finished = server.finish_requests()
    server.stop()
    server.start()
    return has_finished


WAYS: dict[str, Callable[[launcher.Server], bool | None]] = {
    "server": kill_server,
    "model": kill_public_model,
    "stop": stop_server,
    "drain": drain_server,
}


def fail_over(
    servers: Sequence[launcher.Server],
    gateway: RunningGateway,
    readers: Readers,
    ways: Sequence[str],
    log: Callable[[str], None] = print,
) -> Result:
    """Kill one replica after the other in these ways while the readers read; return what they saw."""
    began_s, num_met, num_cut = time.monotonic(), [], 0
    readers.start()
    try:
        for number, way in enumerate(ways):
            goal = readers.num_tokens + TOKENS_BETWEEN
            until(lambda goal=goal: readers.num_tokens >= goal or readers.faults, f"{TOKENS_BETWEEN} tokens", LIMIT_S)
            num_met.append(readers.num_running)
            num_cut += WAYS[way](servers[number % len(servers)]) is False
            until(lambda: gateway.get("/ready").json()["num_usable"] == len(servers), "all replicas", LIMIT_S)
            log(f"{time.monotonic() - began_s:.0f} s: {way} {number % len(servers)} is back; {dict(readers.outcomes)}")
    finally:
        readers.stop()
    num_failovers = int(gateway.metric("spec_gateway_failovers_total"))
    return Result(
        list(ways), num_met, num_cut, readers.outcomes, readers.faults, num_failovers, time.monotonic() - began_s
    )


@contextlib.contextmanager
def replicas(folder: Path, num_replicas: int, **options: Any) -> Iterator[list[launcher.Server]]:
    """Run replicas of one tiny random target in float64. options: of `launcher.Server`."""
    make_tiny_target(folder / "target", max_position_embeddings=1024)
    config = folder / "serving.toml"
    config.write_text('target = "target"\ndtype = "float64"\nkv_memory_mb = 64\nmax_waiting = 128\n')
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(launcher.Server(config, **options)) for _ in range(num_replicas)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the acceptance test; return 1 if a response differs or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=100, help="readers at once (%(default)s)")
    parser.add_argument("--replicas", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--kills", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=300, help="length of a text (%(default)s)")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as name,
        replicas(Path(name), options.replicas) as servers,
        running_gateway(
            ",".join(server.grpc_url for server in servers),
            Path(name) / "target",
            silence_limit_s=10,
            health_interval_s=0.5,
        ) as gateway,
    ):
        print(f"{len(servers)} replicas run", flush=True)
        cases = make_cases(servers[0].grpc_url, options.streams, options.max_tokens)
        print(f"{len(cases)} texts of an undisturbed replica", flush=True)
        readers = Readers(gateway.url, cases, options.streams)
        ways = [list(WAYS)[number % len(WAYS)] for number in range(options.kills)]
        result = fail_over(servers, gateway, readers, ways, lambda line: print(line, flush=True))
    print(result.line())
    for fault in result.faults[:5]:
        print(f"FAULT: {fault[:2000]}")
    return int(bool(result.faults))


if __name__ == "__main__":
    sys.exit(main())
