"""The probe that asks for a token, before stand-ins of a server's two ports."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import ValidationError

from launcher import probe
from launcher.probe import Probe
from orchestrator.core.deployment.config import ServingConfig
from tests.support.hanging import WAIT_S


class Port:
    """Answers /generate with `status` and `body`, and metrics with `passes`, which grow by `more` with each look."""

    def __init__(self) -> None:
        self.status, self.body = 200, {"text_output": "b"}
        self.passes, self.more, self.num_asked = 7, 0, 0
        self.answers = threading.Event()
        self.answers.set()
        port = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                port.num_asked += 1
                port.answers.wait(WAIT_S)
                self._answer(port.status, json.dumps(port.body))

            def do_GET(self) -> None:
                self._answer(200, f'spec_passes_total{{model="target"}} {port.passes}\n')
                port.passes += port.more

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.answers.set()
    made.http.shutdown()
    made.http.server_close()


def test_a_token_is_life(port: Port) -> None:
    assert Probe(port.url, port.url).why_no_token() is None


@pytest.mark.parametrize(
    "message",
    [
        "full: 32 requests run and 64 wait; try again in 3 s (max_running, max_waiting in the deployment file)",
        "full_for_salt: 32 requests run and 64 wait; try again in 3 s",
        "draining: the server is draining",
    ],
)
def test_a_full_or_draining_server_is_well(port: Port, message: str) -> None:
    port.status, port.body = 400, {"error": message}
    assert Probe(port.url, port.url).why_no_token() is None


class Frontend:
    """A gRPC frontend of which a test says what it does not answer."""

    silent: str | None = None

    def silent_method(self) -> str | None:
        return self.silent


def test_a_token_over_http_is_no_life_while_grpc_is_silent(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FRESH_S", 0.0)
    frontend = Frontend()
    asking = Probe(port.url, port.url, frontend)
    assert asking.why_no_token() is None
    frontend.silent, port.more = "ModelInfer", 1
    assert asking.why_no_token() == "gRPC does not answer: ModelInfer got no answer within 10 s"
    assert not asking.is_silent(), "that is about the token"
    frontend.silent = None
    assert asking.why_no_token() is None


def test_an_error_says_why(port: Port) -> None:
    port.status, port.body = 400, {"error": "Stub process 'speculative' is not healthy."}
    asking = Probe(port.url, port.url)
    said = asking.why_no_token()
    assert not asking.is_silent()
    assert said == "no token came: Stub process 'speculative' is not healthy."


def test_only_a_server_that_is_silent_is_said_to_be_late(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LIMIT_S", -0.9)
    port.answers.clear()
    asking = Probe(port.url, port.url)
    assert asking.why_no_token() == "no token came: the server did not answer within 11 s" and asking.is_silent()


def test_a_busy_server_whose_target_makes_passes_is_well(port: Port) -> None:
    port.status, port.body, port.more = 400, {"error": "busy: the request waited until its deadline"}, 1
    assert Probe(port.url, port.url).why_no_token() is None
    port.more = 0
    assert "until its deadline" in (Probe(port.url, port.url).why_no_token() or "")


def test_a_server_that_is_gone_is_named_so(port: Port) -> None:
    port.http.shutdown()
    port.http.server_close()
    assert "Connection refused" in (Probe(port.url, port.url).why_no_token() or "")


def test_no_deployment_can_cut_the_time_limit_of_the_probe() -> None:
    """A lower `max_timeout_ms` would make probes fail early, and a healthy server that is busy be restarted."""
    with pytest.raises(ValidationError, match="max_timeout_ms"):
        ServingConfig(target="t", max_timeout_ms=probe._REQUEST["timeout_ms"] - 1)


def test_probes_in_a_row_share_one_token(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Probe(port.url, port.url)
    assert [asking.why_no_token() for _ in range(5)] == [None] * 5 and port.num_asked == 1
    monkeypatch.setattr(probe, "FRESH_S", 0.0)
    asking.why_no_token()
    assert port.num_asked == 2
