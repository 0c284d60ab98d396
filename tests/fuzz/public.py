"""`python -m tests.fuzz.public`: many requests, most of them wrong, to a small server and a gateway before it.

Law: each gets an answer within its time; an error is a client's or says that the log has the cause; no answer has an
internal name in it; and in the end every process is the one that was started.
exit status: 0 the law held, 1 it did not (the request and the answer are shown).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from launcher.server import Server
from orchestrator.server.inputs import INPUTS
from tests.support.clients import connect
from tests.support.gateway import running_gateway
from tests.support.leaks import leak_in
from tests.support.tiny_models import make_tiny_target

#: Most time of one request: its own deadline is shorter.
LIMIT_S, TIMEOUT_MS = 30.0, 5_000
#: Statuses of HTTP that an answer may have. Triton says 400 and 500 for what a model refuses.
STATUSES = {200, 400, 401, 404, 405, 413, 422, 429, 500, 503}
INTERNAL = "internal error"
DATATYPES = {"BYTES": "bytes_contents", "INT32": "int_contents", "FP32": "fp32_contents", "BOOL": "bool_contents"}


class Doors(NamedTuple):
    """http, grpc: of the server. gateway: its URL."""

    http: str
    grpc: str
    gateway: str


class Case(NamedTuple):
    """One request. door: where it goes. body: bytes for HTTP, a message for gRPC."""

    door: str
    path: str
    body: Any


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.sampled_from([-1, 0, 1, 2**31 - 1, 2**31, 2**63, 10**400]),
    st.floats(), st.text(max_size=12), st.sampled_from(["", "\x00", "\ud800", "a" * 5000, "json", "suffix", "{}", "[[0]]"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
inputs = st.sampled_from(sorted(INPUTS))
SOUND: dict[str, Any] = {"text_input": "abc", "max_tokens": 3, "timeout_ms": TIMEOUT_MS}
COMPLETION: dict[str, Any] = {"prompt": "abc", "max_tokens": 3, "timeout_ms": TIMEOUT_MS}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "timeout_ms": TIMEOUT_MS}
FIELDS = [
    "prompt", "messages", "max_tokens", "stop", "logit_bias", "n", "stream", "stream_options", "response_format", "seed",
    "prediction", "top_logprobs", "logprobs", "echo", "speculation", "speculation_config", "rule", "priority", "tools",
    "stop_token_ids", "bad_words", "allowed_token_ids", "cache_salt", "metadata", "temperature", "top_k", "best_of",
    "chat_template_kwargs", "return_steps", "model", "min_tokens", "num_draft_tokens", "unheard_of",
]  # fmt: skip


@st.composite
def changed_json(draw: st.DrawFn, sound: dict[str, Any], names: st.SearchStrategy[str]) -> bytes:
    """A sound body with some fields set to anything; or its bytes with some of them changed."""
    body = sound | draw(st.dictionaries(names, values, max_size=4))
    data = bytearray(json.dumps(body).encode())
    if draw(st.integers(0, 9)) == 0:
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, len(data)))
            data[start : start + draw(st.integers(0, 6))] = draw(st.binary(max_size=6))
    if draw(st.integers(0, 39)) == 0:
        levels = draw(st.integers(50, 5000))
        data = bytearray(b'{"prompt": "a", "metadata": ' + b"[" * levels + b"]" * levels + b"}")
    return bytes(data)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """A request over gRPC: sound, but for tensors of any datatype, shape and number of values."""
    request = service_pb2.ModelInferRequest(model_name=draw(st.sampled_from(["speculative", "speculative_unary"])))
    _add(request, "input_ids", "INT32", (1, 3), [5, 6, 7])
    _add(request, "max_tokens", "INT32", (1, 1), [3])
    _add(request, "timeout_ms", "INT32", (1, 1), [TIMEOUT_MS])
    for name in draw(st.lists(inputs, max_size=3, unique=True)):
        datatype = draw(st.sampled_from(sorted(DATATYPES)))
        kind: dict[str, st.SearchStrategy[Any]] = {
            "BYTES": st.binary(max_size=20),
            "INT32": st.integers(-(2**31), 2**31 - 1),
            "FP32": st.floats(width=32),
            "BOOL": st.booleans(),
        }
        found = draw(st.lists(kind[datatype], max_size=4))
        _add(request, name, datatype, draw(st.sampled_from([(1, len(found)), (len(found),), (1, 1), (1, 0)])), found)
    for name in draw(st.lists(st.one_of(inputs, st.text(max_size=6)), max_size=1)):
        request.parameters[name].string_param = draw(st.text(alphabet=st.characters(codec="utf-8"), max_size=20))
    return request


def _add(request: Any, name: str, datatype: str, shape: Sequence[int], found: list[Any]) -> None:
    tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
    getattr(tensor.contents, DATATYPES[datatype]).extend(found)


cases = st.one_of(
    st.builds(Case, st.just("http"), st.just("/v2/models/speculative/generate"), changed_json(SOUND, inputs)),
    st.builds(Case, st.just("http"), st.just("/v2/models/speculative/generate_stream"), changed_json(SOUND, inputs)),
    st.builds(Case, st.just("grpc"), st.just("stream"), tensors()),
    st.builds(Case, st.just("gateway"), st.just("/v1/completions"), changed_json(COMPLETION, st.sampled_from(FIELDS))),
    st.builds(Case, st.just("gateway"), st.just("/v1/chat/completions"), changed_json(CHAT, st.sampled_from(FIELDS))),
    st.builds(Case, st.just("gateway"), st.just("/tokenize"), changed_json({"prompt": "a"}, st.sampled_from(FIELDS))),
)


def check(doors: Doors, case: Case, seen: Counter[str]) -> None:
    """Send a request and hold its answer to the law."""
    began_s = time.monotonic()
    status, answer = _over_grpc(doors.grpc, case.body) if case.door == "grpc" else _over_http(doors, case)
    shown = f"{case.path} {str(case.body)[:2000]}: {status} {answer[:2000]}"
    assert time.monotonic() - began_s < LIMIT_S, f"late: {shown}"
    assert case.door == "grpc" or int(status) in STATUSES, shown
    assert INTERNAL not in answer, shown
    if status not in ("200", "OK"):  # a text may say anything
        assert not leak_in(answer), f"{leak_in(answer)!r} in {shown}"
    seen[f"{case.path} {status}"] += 1


def _over_http(doors: Doors, case: Case) -> tuple[str, str]:
    connection = connect(doors.gateway if case.door == "gateway" else doors.http, LIMIT_S)
    try:
        connection.request("POST", case.path, case.body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return str(response.status), response.read().decode(errors="replace")
    finally:
        connection.close()


def _over_grpc(url: str, request: Any) -> tuple[str, str]:
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            answers = list(stub.ModelStreamInfer(iter([request]), timeout=LIMIT_S))
        except grpc.RpcError as error:
            assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, "no answer"
            return error.code().name, error.details() or ""
    errors = [answer.error_message for answer in answers if answer.error_message]
    assert answers, "the stream ended without an answer"
    return ("error", errors[0]) if errors else ("OK", "")


@contextlib.contextmanager
def served() -> Iterator[tuple[Server, Doors]]:
    """Run a server over a tiny target and a gateway before it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        make_tiny_target(Path(folder) / "target")
        config = Path(folder) / "serving.toml"
        config.write_text('target = "target"\ndtype = "float64"\nkv_memory_mb = 32\ndefault_speculation = "none"\n')
        template = Path(folder) / "chat.jinja"
        template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
        chats = {"chat_template": str(template)}  # without one, every chat is refused before anything of it is read
        with Server(config) as server, running_gateway(server.grpc_url, Path(folder) / "target", **chats) as gateway:
            yield server, Doors(server.http_url, server.grpc_url, gateway.url)


def fuzz(server: Server, doors: Doors, num_cases: int, seen: Counter[str]) -> None:
    """Send so many requests; raises AssertionError with the smallest that breaks the law."""
    before = server.pids()

    @settings(
        max_examples=num_cases, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(cases)
    def send(case: Case) -> None:
        check(doors, case, seen)

    send()
    assert server.pids() == before, "a process has ended"
    assert server.failure() is None, server.failure()


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz a server of its own; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.public", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, metavar="N", help="how many requests (%(default)s)")
    options = parser.parse_args(arguments)
    began_s, seen = time.monotonic(), Counter[str]()
    try:
        with served() as (server, doors):
            fuzz(server, doors, options.cases, seen)
    except AssertionError as error:
        print(f"the law is broken: {error}", flush=True)
        return 1
    finally:
        for answer, count in sorted(seen.items()):
            print(f"{count:7} {answer}")
    print(f"{sum(seen.values())} requests in {time.monotonic() - began_s:.0f} s: the law held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
