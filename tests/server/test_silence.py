"""Processes that are stopped (SIGSTOP): alive for the kernel, silent for all others, and replaced like dead ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import Server
from tests.server.conftest import deployment, link, serving
from tests.support.clients import Stream, ask, fetch, until
from tests.support.deaths import await_ready, await_replaced, pid_of, unless_triton_aborts

pytestmark = [pytest.mark.server, pytest.mark.long]

HANG_LIMIT_S = 4
REQUEST = {"text_input": "abcabc", "max_tokens": 400, "ignore_eos": True, "seed": 5, "temperature": 0.9, "stream": True}


@pytest.fixture(scope="module")
def watched(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = link(checkpoints, tmp_path_factory.mktemp("silence"))
    with serving(deployment(folder, 'default_speculation = "none"'), hang_limit_s=HANG_LIMIT_S) as server:
        yield server


def readiness(server: Server, path: str = "/ready") -> str:
    return str(fetch(server.health_url, path).body)


def test_a_text_goes_on_where_it_was_when_the_target_is_stopped_for_good(watched: Server) -> None:
    expected = ask(watched.grpc_url, **REQUEST).ids
    target = pid_of(watched, "target")
    with unless_triton_aborts(watched), Stream(watched.grpc_url) as stream:
        stream.send("r", **REQUEST)
        received = [stream.receive()]
        os.kill(target, signal.SIGSTOP)
        until(lambda: "target has been silent for" in readiness(watched), "readiness that names the silent model")
        while not received[-1].final:
            received.append(stream.receive())
    assert [token for r in received if r.values for token in r.values["output_ids"]] == expected
    await_replaced(watched, "target", target)  # the whole text may have been sent before the process was stopped
    until(lambda: readiness(watched) == "ok\n", "readiness")


def test_a_stopped_public_model_is_replaced_and_serves(watched: Server) -> None:
    speculative = pid_of(await_ready(watched), "speculative")
    os.kill(speculative, signal.SIGSTOP)
    await_replaced(watched, "speculative", speculative)
    until(lambda: readiness(watched) == "ok\n", "readiness")
    assert readiness(watched, "/token") == "ok\n"
    assert ask(watched.grpc_url, **REQUEST).last["finish_reason"] == "length"
