"""A server that is drained or stopped: running requests end whole, new ones are refused, and the launcher says so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from launcher.server import Server
from tests.failover import Readers, fail_over, make_cases, replicas
from tests.server.conftest import deployment, repository, serving
from tests.support.clients import Http, Stream, ask, ask_unary, fetch, generate, until
from tests.support.gateway import running_gateway
from tests.support.scripted_target import PROMPT, Script, text_at
from tests.support.throwaway import launcher_command

pytestmark = [pytest.mark.server, pytest.mark.slow]

NUM_TOKENS = 6


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (tmp_path / "script").mkdir()
    return Script(tmp_path / "script")


@pytest.fixture
def scripted(linked: Path, script: Script) -> dict[str, Any]:
    """The options of a server over the scripted target, where two requests run at once and one waits."""
    config = deployment(
        linked, "max_running = 2", "max_waiting = 1", 'placement = "separate"', 'default_speculation = "none"'
    )
    models = repository(linked, "speculative", "speculative_unary", target="target.py")
    return {"config": config, "repository": models, "environ": {"SCRIPT_FOLDER": str(script.folder)}}


def request(name: str) -> dict[str, Any]:
    return {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "stream": True, "cache_salt": name}


def send_all(script: Script, stream: Stream, queue: Stream) -> None:
    """Send two requests that run, on one stream, and on another stream one that waits; return once it waits."""
    for name in ("a", "b"):
        stream.send(name, **request(name))
    for name in ("a", "b"):
        script.await_step(name, 1)
    for name in ("waits", "full"):
        queue.send(name, **request(name))
    assert "try again in" in queue.answers("full")["full"].error


def go_all(script: Script) -> None:
    for name in ("a", "b", "waits"):
        script.go(name)


def drain_command(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher.drain", *arguments],
        env={**os.environ, "SPECSERVE_HEALTH_PORT": str(server.ports.health)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check_refused(server_http: str, server_grpc: str) -> None:
    """Check that every protocol refuses a new request and says where to send it instead."""
    words = "draining: the server is draining: send the request to another replica"
    assert words in ask(server_grpc, **request("free")).error
    with pytest.raises(grpc.RpcError, match=words) as refused:
        ask_unary(server_grpc, text_input=PROMPT, max_tokens=1, cache_salt="free")
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    answer = generate(server_http, {"text_input": PROMPT, "max_tokens": 1, "cache_salt": "free"})
    assert answer.status != 200 and words in answer.error


def test_drain_ends_what_was_accepted_refuses_the_rest_and_can_be_cancelled(
    scripted: dict[str, Any], script: Script
) -> None:
    with serving(scripted["config"], repository=scripted["repository"], env=scripted["environ"]) as server:
        assert (fetch(server.health_url, "/live").status, fetch(server.health_url, "/ready").status) == (200, 200)
        with Stream(server.grpc_url) as stream, Stream(server.grpc_url) as queue, ThreadPoolExecutor(1) as pool:
            send_all(script, stream, queue)

            assert drain_command(server, "--limit-s", "0.2").returncode == 1  # they run still
            assert fetch(server.health_url, "/drain").body == {"draining": True, "running": 2}
            assert fetch(server.health_url, "/live").status == 200
            assert fetch(server.health_url, "/ready") == Http(503, "the server is draining\n")
            check_refused(server.http_url, server.grpc_url)

            finished = pool.submit(drain_command, server)
            go_all(script)
            answers = stream.answers("a", "b") | queue.answers("waits")
            assert [answers[name].ids for name in answers] == [text_at(3, NUM_TOKENS)] * 3
            assert (finished.result().returncode, finished.result().stderr) == (0, "")

        assert drain_command(server, "--cancel").returncode == 0
        assert fetch(server.health_url, "/ready").status == 200
        assert ask(server.grpc_url, **request("free")).ids == text_at(3, NUM_TOKENS)


@contextmanager
def started(scripted: dict[str, Any], **environ: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run `python -m launcher`; yield the process, its HTTP address and its gRPC address."""
    process = launcher_command(scripted["config"], scripted["repository"], **scripted["environ"], **environ)
    try:
        assert process.stdout
        line = process.stdout.readline()
        found = re.search(r"s: (\S+), gRPC (\S+),", line)
        assert found, line
        yield process, found[1], found[2]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def test_sigterm_lets_streams_end_whole_and_refuses_new_requests(scripted: dict[str, Any], script: Script) -> None:
    with (
        started(scripted, SPECSERVE_STOP_LIMIT_S="60") as (process, http_url, grpc_url),
        Stream(grpc_url) as stream,
        Stream(grpc_url) as queue,
    ):
        send_all(script, stream, queue)
        process.send_signal(signal.SIGTERM)
        until(lambda: ask(grpc_url, **request("full")).error.startswith("draining: the server"), "the drain")
        check_refused(http_url, grpc_url)
        go_all(script)
        answers = stream.answers("a", "b") | queue.answers("waits")
        assert [answers[name].ids for name in answers] == [text_at(3, NUM_TOKENS)] * 3
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert [line.partition("Z ")[2] for line in errors.splitlines()] == [
            "draining: 2 sequences run, stopping in 60 s at the latest"
        ]


@pytest.mark.parametrize("hurry", [True, False], ids=["second signal", "limit"])
def test_stop_does_not_wait_for_ever(scripted: dict[str, Any], script: Script, hurry: bool) -> None:
    with started(scripted, SPECSERVE_STOP_LIMIT_S="3600" if hurry else "1") as (process, _, grpc_url):
        stream = Stream(grpc_url)
        stream.send("a", **request("a"))
        script.await_step("a", 1)
        process.send_signal(signal.SIGTERM)
        until(lambda: ask(grpc_url, **request("free")).error, "the drain")
        if hurry:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert errors.splitlines()[-1].partition("Z ")[2] == "stopping: requests still run"
        with pytest.raises(grpc.RpcError):
            while True:
                stream.receive()


def test_rolling_restart_of_two_replicas_under_load_loses_nothing(tmp_path: Path) -> None:
    """Every text equals the undisturbed one: a draining replica finishes what runs, and the gateway moves the rest."""
    with (
        replicas(tmp_path, 2, stop_limit_s=120) as servers,
        running_gateway(
            ",".join(server.grpc_url for server in servers), tmp_path / "target", health_interval_s=0.3
        ) as gateway,
    ):
        cases = make_cases(servers[0].grpc_url, 12, 200)
        result = fail_over(servers, gateway, Readers(gateway.url, cases, 6), ["drain", "drain"])
    print(result.line())
    assert not result.faults, result.faults[:3]
    assert result.outcomes.keys() == {"equal"}
    assert min(result.num_met) > 0  # the other readers were between two texts
    assert result.num_cut == 0
