"""Reloading: a running server takes over new limits, drafters and tables without losing or changing a text."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.server import REPOSITORY, Server
from orchestrator.core.errors import ServingError
from tests.server.conftest import deployment, link, serving
from tests.support.clients import Stream, ask, fetch, until
from tests.support.throwaway import launcher_command
from tests.support.tiny_models import make_tiny_target

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
    make_tiny_target(folder / "draft2", seed=2, num_hidden_layers=1)
    with serving(deployment(folder, BASE, *LINES)) as server:
        yield Deployment(server, folder)


@pytest.fixture(autouse=True)
def as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "deployed" in request.fixturenames:
        deployed = request.getfixturevalue("deployed")
        deployed.write(*LINES)
        deployed.server.reload()


def while_streams_run(deployed: Deployment, action: Callable[[], None], count: int = 4) -> list[list[int]]:
    """Do `action` while streams run; return their ids."""
    names = [str(number) for number in range(count)]
    with ThreadPoolExecutor(1) as pool, Stream(deployed.server.grpc_url) as stream:
        for name in names:
            stream.send(name, **PROMPT, max_tokens=LONG, speculation="draft_model", stream=True)
        done = pool.submit(action)
        answers = stream.answers(*names)
        done.result(timeout=120)
    return [answers[name].ids for name in names]


def test_new_limits_hold_afterwards(deployed: Deployment) -> None:
    deployed.write('draft = "draft"', "max_tokens_limit = 20", "max_running = 2", "max_waiting = 1")
    assert deployed.server.reload() == "reload: max_running 32 -> 2, max_waiting 64 -> 1, max_tokens_limit 100 -> 20"
    url = deployed.server.grpc_url
    assert "max_tokens must be in 1..20 after a prompt of 3 tokens, got 21" in ask(url, **PROMPT, max_tokens=21).error
    assert "num_return_sequences must be in 0..2" in ask(url, **PROMPT, num_return_sequences=3).error
    assert len(deployed.text(max_tokens=20)) == 20


def test_streams_under_way_keep_their_text_and_later_ones_have_the_new_drafter(deployed: Deployment) -> None:
    expected = deployed.text("none")
    said = []

    def action() -> None:
        for folder in ("draft2", "draft"):
            deployed.write(f'draft = "{folder}"', "max_tokens_limit = 100")
            said.append(deployed.server.reload())

    assert while_streams_run(deployed, action) == [expected] * 4
    assert [line.partition(" '")[0] for line in said] == ["reload: draft"] * 2
    assert deployed.text() == expected


def test_a_drafter_whose_files_changed_is_loaded_anew(deployed: Deployment) -> None:
    deployed.write('draft = "draft2"', "max_tokens_limit = 100")
    deployed.server.reload()
    os.utime(deployed.folder / "draft2/config.json")
    assert deployed.server.reload() == "reload: draft (its files)"
    assert deployed.server.reload() == "reload: nothing has changed"


def test_a_drafter_that_is_named_no_more_is_refused_and_can_come_back(deployed: Deployment) -> None:
    deployed.write("max_tokens_limit = 100")
    deployed.server.reload()
    assert "draft" in ask(deployed.server.grpc_url, **PROMPT, speculation="draft_model").error
    deployed.write(*LINES)
    deployed.server.reload()
    assert deployed.text() == deployed.text("none")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["max_runing = 3"], "unknown key 'max_runing'; did you mean 'max_running'?"),
        (["max_tokens_limit = 0"], "max_tokens_limit must be"),
        (["kv_memory_mb = 64"], "not TOML"),  # named twice
        (["block_tokens = 8"], "block_tokens 16 -> 8: block_tokens cannot be changed while the server runs"),
        (['placement = "separate"'], "(a rolling restart; a reload may change max_running,"),
        (['ngram_tables = "draft"'], "cannot read"),
        (['eagle = "draft"'], "hidden states that the target does not keep"),
    ],
)
def test_what_cannot_be_served_changes_nothing(deployed: Deployment, lines: list[str], words: str) -> None:
    deployed.write('draft = "draft"', *lines)
    assert words in deployed.refusal()
    assert len(deployed.text()) == LONG


@pytest.mark.parametrize(("draft", "words"), [("nowhere", "does not exist (key draft"), ("broken", "model target: ")])
def test_a_draft_model_that_cannot_be_loaded_changes_nothing(deployed: Deployment, draft: str, words: str) -> None:
    """The target's process finds out that one is broken after the public models have agreed to the new limit."""
    (deployed.folder / "broken").mkdir(exist_ok=True)
    (deployed.folder / "broken/config.json").write_text("{}")
    deployed.write(f'draft = "{draft}"', "max_tokens_limit = 20")
    assert words in deployed.refusal()
    assert len(deployed.text()) == LONG and deployed.server.drafters == ("draft",)


def test_the_command_and_the_health_port_reload(deployed: Deployment) -> None:
    server = deployed.server
    environ = {**os.environ, "SPECSERVE_HEALTH_PORT": str(server.ports.health)}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launcher.reload"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)

    deployed.write('draft = "draft"', "max_tokens_limit = 50")
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "reload: max_tokens_limit 100 -> 50\n", "")
    deployed.write('draft = "draft"', "dtype = 3")
    done = run()
    assert done.returncode == 1 and "not TOML" in done.stderr
    assert fetch(server.health_url, "/reload").status == 404


def test_sighup_reloads_and_does_not_stop(linked: Path) -> None:
    config = deployment(linked, BASE, "max_tokens_limit = 30")
    process = launcher_command(config, REPOSITORY)
    try:
        assert process.stdout and process.stderr
        ready = re.search(r"s: \S+, gRPC (\S+),", process.stdout.readline())
        assert ready, process.stderr.read()
        deployment(linked, BASE, "max_tokens_limit = 20")
        process.send_signal(signal.SIGHUP)
        until(lambda: "in 1..20" in ask(ready[1], **PROMPT, max_tokens=21).error, "the reload")
        deployment(linked, BASE, "max_tokens_limit = 0")
        process.send_signal(signal.SIGHUP)
        assert len(ask(ready[1], **PROMPT, max_tokens=20).ids) == 20
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "reload: max_tokens_limit 30 -> 20" in errors
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)
