"""A Triton of which only gRPC is stuck: live and ready over HTTP, and every model generates."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import Server, answer_watch, grpc_frontend
from launcher.grpc_frontend import GrpcFrontend
from launcher.probe import Probe
from tests.server.conftest import deployment, link, serving
from tests.support.clients import ask, fetch, until
from tests.support.deaths import await_ready, await_replaced, pid_of
from tests.support.stopped_threads import stopped, woken_threads

pytestmark = [pytest.mark.server, pytest.mark.long]

REQUEST = {"text_input": "abcabc", "max_tokens": 40, "seed": 5, "temperature": 0.9, "stream": True}


class Watched:
    """A server whose launcher asks often, and what the launcher has said."""

    def __init__(self, server: Server, said: list[str]) -> None:
        self.server, self.said = server, said
        self.frontend = GrpcFrontend("127.0.0.1", server.ports.grpc)

    def ask_often(self) -> None:
        """Have the threads of the gRPC frontend woken often."""
        for _ in range(200):
            assert self.frontend.silent_method() is None


@pytest.fixture(scope="module")
def watched(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    said: list[str] = []
    config = deployment(link(checkpoints, tmp_path_factory.mktemp("stuck")), 'default_speculation = "none"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_watch, "PERIOD_S", 0.2)
        patch.setattr(grpc_frontend, "LIMIT_S", 2.0)
        with serving(config, said=said, hang_limit_s=6) as server:
            yield Watched(server, said)


def test_grpc_answers_the_watch_while_the_models_do_not(watched: Watched) -> None:
    """So a server that is only busy is not taken for one that is stuck."""
    server = watched.server
    assert not ask(server.grpc_url, **REQUEST).error
    triton, target = pid_of(server, "tritonserver"), pid_of(server, "target")
    os.kill(target, signal.SIGSTOP)
    until(lambda: "silent" in (server.why_not_ready() or ""), "a target that is seen to be silent")
    assert watched.frontend.silent_method() is None
    await_replaced(server, "target", target)
    assert pid_of(await_ready(server), "tritonserver") == triton


def test_a_triton_of_which_only_grpc_is_stuck_is_killed_and_serves_again(watched: Watched) -> None:
    server = watched.server
    expected = ask(server.grpc_url, **REQUEST).ids
    triton = pid_of(server, "tritonserver")
    with stopped(woken_threads(triton, watched.ask_often)[:3]):
        assert watched.frontend.silent_method() is not None
        assert Probe(server.http_url, server.metrics_url).why_no_token() is None
        assert server.why_not_live() is None and server.why_not_ready() is None
        token = fetch(server.health_url, "/token")
        assert token.status == 503 and "gRPC does not answer" in str(token.body)
        await_replaced(server, "tritonserver", triton)
    assert any("over gRPC; killing it" in line for line in watched.said), watched.said
    assert ask(await_ready(server).grpc_url, **REQUEST).ids == expected
