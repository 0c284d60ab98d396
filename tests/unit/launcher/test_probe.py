"""The probe that asks for a token, before stand-ins of a server's two ports."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launcher import probe
from launcher.probe import Probe, with_kernels
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


def probe_of(port: Port, limit_s: float = 10.0) -> Probe:
    return Probe(port.url, port.url, ["speculative", "speculative_unary"], limit_s)


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.answers.set()
    made.http.shutdown()
    made.http.server_close()


def test_a_token_is_life(port: Port) -> None:
    assert probe_of(port).why_no_token() is None


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
    assert probe_of(port).why_no_token() is None


def test_an_error_says_why(port: Port) -> None:
    port.status, port.body = 400, {"error": "Stub process 'speculative' is not healthy."}
    assert probe_of(port).why_no_token() == (
        "no token came from speculative: Stub process 'speculative' is not healthy."
    )


def test_a_deadline_without_a_token_is_no_token(port: Port) -> None:
    port.body = {"text_output": "", "finish_reason": "deadline"}
    assert probe_of(port).why_no_token() == "no token came from speculative: none within 10 s"


def test_a_silent_model_is_not_well_whatever_runs(port: Port) -> None:
    """The process of a public model answers by the deadline, unless it is stopped or stuck."""
    port.answers.clear()
    port.more = 1
    assert probe_of(port, 0.05).why_no_token() == "no token came: speculative did not answer within 0.1 s"


def test_a_busy_server_whose_target_makes_passes_is_well(port: Port) -> None:
    port.status, port.body, port.more = 400, {"error": "busy: the request waited until its deadline"}, 1
    assert probe_of(port).why_no_token() is None
    port.more = 0
    assert "until its deadline" in (probe_of(port).why_no_token() or "")


def test_a_server_that_is_gone_is_named_so(port: Port) -> None:
    port.http.shutdown()
    port.http.server_close()
    assert "Connection refused" in (probe_of(port).why_no_token() or "")


def test_probes_in_a_row_share_one_token(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = probe_of(port)
    assert [asking.why_no_token() for _ in range(5)] == [None] * 5 and port.num_asked == 2
    monkeypatch.setattr(probe, "FRESH_S", 0.0)
    asking.why_no_token()
    assert port.num_asked == 4


METRICS = """# TYPE spec_engine_info gauge
spec_engine_info{device="cpu",dtype="float32",engine="torch",kernels="native",model="target"} 1
spec_engine_info{kernels="torch",model="draft",device="cpu"} 1
spec_kv_blocks{model="target",state="held"} 3
"""


def test_each_model_is_shown_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_read", lambda url: METRICS)
    assert with_kernels(["target", "draft", "medusa"], "") == ["target (native)", "draft (torch)", "medusa"]


def test_a_metrics_port_that_does_not_answer_says_nothing(port: Port) -> None:
    port.http.shutdown()
    port.http.server_close()
    assert with_kernels(["target"], port.url) == ["target"]
