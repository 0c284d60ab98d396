"""Reloading: a server restarts behind a drain with its changed deployment file, or refuses the file and goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from launcher.server import REPOSITORY, Server
from orchestrator.core.errors import ServingError
from tests.server.conftest import deployment, link, serving
from tests.support.clients import Stream, ask, fetch, until
from tests.support.throwaway import launcher_command

pytestmark = pytest.mark.server

PROMPT = {"input_ids": [5, 6, 7], "temperature": 0.8, "seed": 11, "ignore_eos": True}
LONG = 90
BASE = 'default_speculation = "none"\ndefault_max_tokens = 8'
LINES = ('draft = "draft"', "max_tokens_limit = 100")


class Deployment:
    """A server over a folder whose serving.toml the tests rewrite."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder

    def write(self, *lines: str) -> None:
        deployment(self.folder, BASE, *lines)

    def text(self, method: str = "draft_model", max_tokens: int = LONG) -> list[int]:
        return ask(self.server.grpc_url, **PROMPT, speculation=method, max_tokens=max_tokens).ids

    def refusal(self) -> str:
        with pytest.raises(ServingError) as refused:
            self.server.reload()
        return str(refused.value)


@pytest.fixture(scope="module")
def deployed(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = link(checkpoints, tmp_path_factory.mktemp("reload"))
    with serving(deployment(folder, BASE, *LINES)) as server:
        yield Deployment(server, folder)


def test_a_stream_under_way_ends_whole_and_the_new_settings_hold_afterwards(deployed: Deployment) -> None:
    expected = deployed.text("none")
    deployed.write("max_tokens_limit = 100", "max_running = 2", 'aliases = "llm"')
    with ThreadPoolExecutor(1) as pool, Stream(deployed.server.grpc_url) as stream:
        stream.send("a", **PROMPT, max_tokens=LONG, speculation="draft_model", stream=True)
        first = stream.receive()
        done = pool.submit(deployed.server.reload)
        answer = stream.answers("a")["a"]
        answer.responses.insert(0, first)
        words = f"reload: draft '{deployed.folder / 'draft'}' -> '', max_running 32 -> 2, aliases '' -> 'llm'"
        assert done.result(timeout=120) == words
    assert answer.ids == expected
    assert "draft" in ask(deployed.server.grpc_url, **PROMPT, speculation="draft_model").error
    assert (
        "num_return_sequences must be in 0..2" in ask(deployed.server.grpc_url, **PROMPT, num_return_sequences=3).error
    )
    assert "llm" in deployed.server.pids().values() and deployed.server.why_not_ready() is None
    deployed.write(*LINES)
    deployed.server.reload()
    assert deployed.text() == expected


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["max_runing = 3"], "unknown key 'max_runing'; did you mean 'max_running'?"),
        (["max_tokens_limit = 0"], "max_tokens_limit must be"),
        (['draft = "nowhere"'], "does not exist (key draft"),
    ],
)
def test_a_file_that_cannot_be_served_changes_nothing(deployed: Deployment, lines: list[str], words: str) -> None:
    before = deployed.server.pids()
    deployed.write(*lines)
    assert words in deployed.refusal()
    assert deployed.server.pids() == before and len(deployed.text()) == LONG
    deployed.write(*LINES)


def test_the_command_reloads_by_the_health_port(deployed: Deployment) -> None:
    server = deployed.server
    environ = {**os.environ, "SPECSERVE_HEALTH_PORT": str(server.ports.health)}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launcher.reload"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)

    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "reload: no key has changed\n", "")
    deployed.write("max_tokens_limit = 0")
    done = run()
    assert done.returncode == 1 and "max_tokens_limit must be" in done.stderr
    deployed.write(*LINES)
    assert fetch(server.health_url, "/reload").status == 404


def test_sighup_reloads_and_models_that_cannot_be_loaded_end_the_launcher(linked: Path) -> None:
    config = deployment(linked, BASE, "max_tokens_limit = 30")
    process = launcher_command(config, REPOSITORY)
    try:
        assert process.stdout and process.stderr
        ready = re.search(r"s: \S+, gRPC (\S+),", process.stdout.readline())
        assert ready, process.stderr.read()
        deployment(linked, BASE, "max_tokens_limit = 20")
        process.send_signal(signal.SIGHUP)

        def refuses() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return "in 1..20" in ask(ready[1], **PROMPT, max_tokens=21).error
            return False

        until(refuses, "the new limit")
        (linked / "broken").mkdir()
        (linked / "broken/config.json").write_text("{}")
        deployment(linked, BASE, 'draft = "broken"')
        process.send_signal(signal.SIGHUP)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "reload: max_tokens_limit 30 -> 20" in errors
        assert "error: the server did not start: model target: " in errors.splitlines()[-1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)
