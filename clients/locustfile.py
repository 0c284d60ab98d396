"""Load on a speculative decoding server, with locust: streams over gRPC, HTTP or an OpenAI gateway; docs/load.md.

    locust -f locustfile.py GrpcStream --headless -u 16 -t 30s --grpc localhost:8001 --methods none,prompt_lookup

Copy this one file: it needs locust and tritonclient[grpc], and knows nothing of the server but its protocol.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import random
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import gevent
import grpc
import grpc.experimental.gevent as grpc_gevent
from locust import LoadTestShape, User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner
from tritonclient.grpc import service_pb2, service_pb2_grpc

HELD_OUT = Path(__file__).resolve().parent.parent / "tests/data/prompts"
#: Type and protobuf field of the inputs that a request may have.
INPUTS = {
    **dict.fromkeys(("text_input", "speculation", "cache_salt"), ("BYTES", "bytes_contents")),
    "max_tokens": ("INT32", "int_contents"),
    "temperature": ("FP32", "fp32_contents"),
    "stream": ("BOOL", "bool_contents"),
    "seed": ("UINT64", "uint64_contents"),
}


class Refused(Exception):
    """The server answered with an error; the message is the server's own."""


class TextDiffers(Exception):
    """The same prompt and seed gave another text than before."""


class Chunk(NamedTuple):
    """What one response adds. tokens: None if the protocol does not say. totals: of the last response."""

    text: str
    tokens: int | None
    totals: Mapping[str, Any]


class Prompt(NamedTuple):
    """A text to continue."""

    id: str
    text: str


@dataclass
class Stream:
    """One request as its client saw it; times in seconds since it was sent."""

    method: str
    prompt: str
    began_s: float = field(default_factory=time.time)
    times: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    num_steps: int = 0
    error: str = ""

    def add(self, chunk: Chunk) -> None:
        """Take one response."""
        if chunk.tokens or (chunk.tokens is None and chunk.text):
            self.times.append(time.time() - self.began_s)
        self.text += chunk.text
        self.num_tokens += chunk.tokens or 0
        self.num_tokens = chunk.totals.get("num_tokens", self.num_tokens)
        self.num_steps = chunk.totals.get("num_steps", self.num_steps)

    def statistics(self) -> Iterator[tuple[str, float]]:
        """Yield name and value of each statistic; locust keeps two digits, hence small numbers in small units."""
        first_s, last_s, decoded = self.times[0], self.times[-1], self.num_tokens - 1
        yield "first token, ms", 1e3 * first_s
        if decoded > 0 and last_s > first_s:
            yield "inter-token, us", 1e6 * (last_s - first_s) / decoded
            yield "tokens/s", decoded / (last_s - first_s)
        for before_s, at_s in itertools.pairwise(self.times):
            yield "inter-chunk, us", 1e6 * (at_s - before_s)
        yield "tokens/chunk x100", 100 * self.num_tokens / len(self.times)
        if self.num_steps:
            yield "acceptance length x100", 100 * self.num_tokens / self.num_steps

    def record(self) -> dict[str, Any]:
        """Return what the report needs, ready for JSON."""
        return {
            "method": self.method,
            "prompt": self.prompt,
            "began_s": round(self.began_s, 4),
            "times": [round(at_s, 5) for at_s in self.times],
            "num_tokens": self.num_tokens,
            "num_steps": self.num_steps,
            "text": hashlib.sha256(self.text.encode()).hexdigest()[:16],
            "error": self.error,
        }


class Ledger:
    """The records of all streams, and the text of each prompt: with one seed it must not change.

    records: a JSONL file, or empty. texts: a JSON file with the texts of earlier runs under the same key, or empty.
    """

    def __init__(self, records: str, texts: str, key: str) -> None:
        self.pending: list[dict[str, Any]] = []
        self._records, self._texts_file, self._key = records, Path(texts) if texts else None, key
        known = json.loads(self._texts_file.read_text()) if self._texts_file and self._texts_file.exists() else {}
        self._known: dict[str, str] = known

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise TextDiffers unless the text equals the first one seen for its prompt."""
        key = f"{record['prompt']} {self._key}"
        if self._known.setdefault(key, record["text"]) != record["text"]:
            raise TextDiffers(f"prompt {record['prompt']} with {record['method']}: another text than before")

    def take(self) -> list[dict[str, Any]]:
        """Return the pending records and forget them."""
        taken, self.pending = self.pending, []
        return taken

    def write(self) -> None:
        """Append the pending records to their file, and write the texts."""
        if (pending := self.take()) and self._records:
            with Path(self._records).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in pending)
        if self._texts_file:
            self._texts_file.write_text(json.dumps(self._known, indent=0))


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Declare the options in addition to locust's own."""
    add = parser.add_argument
    add("--grpc", default="localhost:8001", help="address of the server's gRPC port")
    add("--http", default="http://localhost:8000", help="address of the server's HTTP port")
    add("--openai", default="http://localhost:9000", help="address of the OpenAI gateway")
    add("--openai-model", default="", help="model that the gateway is asked for")
    add("--methods", default="prompt_lookup", help="drafting methods, by turns; empty = the server's default")
    add("--prompts", default=str(HELD_OUT), help='JSONL file with {"id", "text"}, a text file, or a folder of them')
    add("--max-tokens", type=int, default=64, help="most tokens of each text")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=1, help="fixes every text, whatever the method and the load")
    add("--cache-salt", default="", help="requests share cached prompts only within one salt")
    add("--time-limit", type=float, default=120.0, help="seconds that a request may take")
    add("--arrivals", choices=("closed", "poisson", "step"), default="closed",
        help="closed: each user sends its next request when the last has ended; poisson: --rate requests a second, "
        "however many run; step: closed, with the users of --steps in turn")  # fmt: skip
    add("--rate", type=float, default=1.0, help="poisson: requests a second of all users together")
    add("--steps", default="1,4,16", help="step: numbers of users")
    add("--step-seconds", type=float, default=30.0, help="step: how long each lasts")
    add("--records", default="", help="write one JSON line for each request to this file")
    add("--texts", default="", help="compare texts with those in this JSON file, and add new ones")


class Arrivals(LoadTestShape):
    """How many users there are at a moment."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Return users and spawn rate; None at the end of the run."""
        assert self.runner
        options: Any = self.runner.environment.parsed_options
        now_s = self.get_run_time()
        if options.arrivals == "step":
            steps = [int(users) for users in options.steps.split(",")]
            index = int(now_s // options.step_seconds)
            return (steps[index], steps[index]) if index < len(steps) else None
        if options.run_time and now_s >= float(options.run_time):
            return None
        return options.num_users or 1, options.num_users or 1


@events.init.add_listener
def prepare(environment: Any, **_: Any) -> None:
    """Read the prompts, and set up who keeps the records: a worker sends them to its master."""
    grpc_gevent.init_gevent()  # before the first channel
    options: Any = environment.parsed_options
    key = f"max_tokens={options.max_tokens} temperature={options.temperature} seed={options.seed}"
    is_worker = isinstance(environment.runner, WorkerRunner)
    ledger = Ledger("", "", key) if is_worker else Ledger(options.records, options.texts, key)
    environment.ledger = ledger
    environment.prompts = read_prompts(Path(options.prompts))
    environment.numbers = itertools.count()
    if is_worker:
        environment.events.report_to_master.add_listener(lambda client_id, data: data.update(records=ledger.take()))
    elif isinstance(environment.runner, MasterRunner):
        environment.events.worker_report.add_listener(lambda client_id, data: _receive(environment, ledger, data))
    if not is_worker:
        environment.events.test_stop.add_listener(lambda **_: ledger.write())
        environment.events.quitting.add_listener(lambda **_: ledger.write())


def _receive(environment: Environment, ledger: Ledger, data: dict[str, Any]) -> None:
    """Take a worker's records; only the master can compare the texts of two workers."""
    for record in data.get("records", ()):
        ledger.pending.append(record)
        try:
            if not record["error"]:
                ledger.check(record)
        except TextDiffers as error:
            record["error"] = str(error)
            _fire(environment, "text", record["method"], 0.0, error=error)


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file or a folder: lines of JSON with a text, or one text a file."""
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    prompts = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            prompts += [Prompt(line.get("id", f"{file.stem}-{at}"), line["text"]) for at, line in enumerate(lines)]
        else:
            prompts.append(Prompt(file.stem, text))
    if not prompts:
        raise ValueError(f"no prompts in {path} (--prompts)")
    return prompts


def _fire(environment: Environment, kind: str, name: str, value: float, length: int = 0, error: Any = None) -> None:
    environment.events.request.fire(
        request_type=kind, name=name, response_time=value, response_length=length, exception=error, context={}
    )


class StreamingUser(User):
    """A user that streams texts, each checked against the first with the same prompt and seed."""

    abstract = True
    protocol = ""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.shared, self.options = environment, environment.parsed_options
        self._random = random.Random(next(self.shared.numbers))
        self._streams = gevent.pool.Group()

    def chunks(self, inputs: Mapping[str, Any]) -> Iterator[Chunk]:
        """Send one request and yield its responses; raises Refused, or the protocol's own errors."""
        raise NotImplementedError

    @task
    def run_once(self) -> None:
        """Stream one text; under Poisson arrivals, start it and wait for the next arrival."""
        if self.options.arrivals != "poisson":
            self._stream()
            return
        rate = self.options.rate / (self.options.num_users or 1)
        gevent.sleep(self._random.expovariate(rate))
        self._streams.spawn(self._stream)

    def on_stop(self) -> None:
        """Wait for the streams that Poisson arrivals have started."""
        self._streams.join(timeout=self.options.time_limit)

    def _stream(self) -> None:
        number, options = next(self.shared.numbers), self.options
        methods, prompts = options.methods.split(","), self.shared.prompts
        # All methods of a round get the same prompt; a prime step mixes the tasks.
        prompt = prompts[number // len(methods) * 31 % len(prompts)]
        inputs = {
            "text_input": prompt.text,
            "stream": True,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
            "speculation": methods[number % len(methods)],
            "cache_salt": options.cache_salt,
        }
        stream = Stream(inputs["speculation"] or "default", prompt.id)
        try:
            for chunk in self.chunks({name: value for name, value in inputs.items() if value not in ("", None)}):
                stream.add(chunk)
            if not stream.times:
                raise Refused("the stream ended without a token")
            self.shared.ledger.check(stream.record())
        except (Refused, TextDiffers, grpc.RpcError, OSError, http.client.HTTPException) as error:
            stream.error = str(error) or type(error).__name__
            self._report(stream, error)
        else:
            self._report(stream)

    def _report(self, stream: Stream, error: Exception | None = None) -> None:
        """Show a stream in locust's statistics, and record it."""
        took_s = time.time() - stream.began_s
        _fire(self.environment, self.protocol, stream.method, 1e3 * took_s, stream.num_tokens, error)
        for name, value in () if error else stream.statistics():
            _fire(self.environment, name, stream.method, value)
        record = {"protocol": self.protocol, "process": os.getpid(), **stream.record()}
        self.shared.ledger.pending.append(record)


class GrpcStream(StreamingUser):
    """Streams from the Triton model `speculative` over gRPC."""

    protocol = "grpc"

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._channel = grpc.insecure_channel(self.options.grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def chunks(self, inputs: Mapping[str, Any]) -> Iterator[Chunk]:
        """Stream one text."""
        request = service_pb2.ModelInferRequest(model_name="speculative")
        for name, value in inputs.items():
            datatype, contents = INPUTS[name]
            tensor = request.inputs.add(name=name, datatype=datatype, shape=(1, 1))
            getattr(tensor.contents, contents).append(value.encode() if isinstance(value, str) else value)
        for response in self._stub.ModelStreamInfer(iter([request]), timeout=self.options.time_limit):
            if response.error_message:
                raise Refused(response.error_message)
            yield triton_chunk(_outputs(response.infer_response))

    def on_stop(self) -> None:
        """Close the channel."""
        super().on_stop()
        self._channel.close()


class HttpStream(StreamingUser):
    """Streams from the Triton model `speculative` over HTTP, with generate_stream."""

    protocol = "http"

    def chunks(self, inputs: Mapping[str, Any]) -> Iterator[Chunk]:
        """Stream one text."""
        path = "/v2/models/speculative/generate_stream"
        yield from map(triton_chunk, server_sent(self.options.http, path, inputs, self.options.time_limit))


class OpenAIStream(StreamingUser):
    """Streams completions from an OpenAI-compatible server."""

    protocol = "openai"

    def chunks(self, inputs: Mapping[str, Any]) -> Iterator[Chunk]:
        """Stream one text."""
        request = {**inputs, "prompt": inputs["text_input"], "stream_options": {"include_usage": True}}
        del request["text_input"]
        if self.options.openai_model:
            request["model"] = self.options.openai_model
        for event in server_sent(self.options.openai, "/v1/completions", request, self.options.time_limit):
            yield openai_chunk(event)


def triton_chunk(outputs: Mapping[str, Any]) -> Chunk:
    """Return a response of the Triton model, whose last one has the number of steps."""
    totals = {"num_steps": outputs["num_steps"]} if "num_steps" in outputs else {}
    return Chunk(outputs.get("text_output", ""), outputs.get("num_output_tokens", 0), totals)


def openai_chunk(event: Mapping[str, Any]) -> Chunk:
    """Return a chunk of a completion; only the last, which has the usage, says how many tokens there were."""
    text = "".join(choice.get("text") or "" for choice in event["choices"])
    totals = {"num_tokens": event["usage"]["completion_tokens"]} if event.get("usage") else {}
    speculation = (event.get("metrics") or {}).get("speculative_decoding") or {}
    if "num_spec_steps" in speculation:
        totals["num_steps"] = speculation["num_spec_steps"]
    return Chunk(text, None, totals)


def _outputs(response: Any) -> dict[str, Any]:
    """Return the first value of each output that is used here."""
    found: dict[str, Any] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name == "text_output":
            found["text_output"] = raw[4:].decode()  # after four bytes of its length
        elif tensor.name in ("num_output_tokens", "num_steps"):
            found[tensor.name] = struct.unpack("<i", raw)[0]
    return found


def server_sent(url: str, path: str, request: Mapping[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
    """Send a request and yield the JSON objects of the events that answer it; raises Refused."""
    address = urlsplit(url if "//" in url else f"http://{url}")
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.hostname or "localhost", address.port, timeout=limit_s)
    try:
        body = json.dumps(request)
        connection.request("POST", address.path.rstrip("/") + path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise Refused(f"HTTP {response.status}: {response.read(1 << 16).decode(errors='replace').strip()}")
        for line in response:
            name, _, data = line.decode().strip().partition(":")  # a comment (": ping") has no name
            if name == "data" and data.strip() != "[DONE]":
                event: dict[str, Any] = json.loads(data)
                if error := event.get("error"):
                    raise Refused(error if isinstance(error, str) else error.get("message", str(error)))
                yield event
    finally:
        connection.close()
