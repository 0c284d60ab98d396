"""Processes that are stopped (SIGSTOP): alive for the kernel, silent for all others; Triton is restarted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import Server
from tests.server.conftest import deployment, link, serving
from tests.support.clients import ask, until
from tests.support.deaths import await_ready, pid_of

pytestmark = [pytest.mark.server, pytest.mark.long]

REQUEST = {"text_input": "abcabc", "max_tokens": 40, "ignore_eos": True, "seed": 5, "temperature": 0.9}


@pytest.fixture(scope="module")
def watched(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = link(checkpoints, tmp_path_factory.mktemp("silence"))
    with serving(deployment(folder, 'default_speculation = "none"'), hang_limit_s=4) as server:
        yield server


@pytest.mark.parametrize("model", ["target", "speculative", "speculative_unary", "tritonserver"])
def test_a_stopped_process_costs_a_restart_and_no_text_changes(watched: Server, model: str) -> None:
    expected = ask(await_ready(watched).grpc_url, **REQUEST).ids
    stopped, triton = pid_of(watched, model), pid_of(watched, "tritonserver")
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: triton not in watched.pids(), "the end of the old Triton")
    await_ready(watched)
    assert ask(watched.grpc_url, **REQUEST).ids == expected
    assert watched.failure() is None
