"""Processes that die: a drafter's death costs no text, the target's only time, that of `speculative` its requests."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher import watchdog
from launcher.server import Server
from tests.server.conftest import deployment, link, repository, serving
from tests.support.clients import Stream, ask, generate, until
from tests.support.deaths import await_ready, await_replaced, pid_of, unless_triton_aborts

# The limits are only for hangs: nothing here fails because the machine is slow.
pytestmark = [pytest.mark.server, pytest.mark.slow]

NUM_REQUESTS = 4


def inputs_of(number: int) -> dict[str, Any]:
    """Return a long request; greedy and sampled ones alternate."""
    return {
        "text_input": "the quick brown fox"[number:], "max_tokens": 200, "end_id": -1, "stream": True, "seed": number,
        "temperature": 0.8 * (number % 2),
    }  # fmt: skip


NAMES = [f"r{number}" for number in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a file `break` breaks the target's engine."""
    return tmp_path_factory.mktemp("script")


#: The draft model in a process of its own, and in the target's.
Params = tuple[tuple[str, ...], dict[str, str]]
APART: Params = (('placement = "separate"',), {})
TOGETHER: Params = ((), {})


@pytest.fixture(scope="module", params=[TOGETHER], ids=[""])
def server(
    request: pytest.FixtureRequest, checkpoints: Path, script: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = link(checkpoints, tmp_path_factory.mktemp("deaths"))
    models = repository(folder, "draft", "speculative", "speculative_unary", target="breakable.py")
    lines, environ = request.param
    config, environ = deployment(folder, 'draft = "draft"', *lines), {"SCRIPT_FOLDER": str(script), **environ}
    # A Triton that has lost a process waits for it until its exit time-out, which is not tested here.
    with serving(config, repository=models, env=environ, stop_limit_s=2) as running:
        yield running


@pytest.fixture
def served(server: Server) -> Server:
    """Return the server when it is ready: the launcher starts it again if Triton aborted in the last test."""
    return await_ready(server)


@pytest.fixture(scope="module")
def truth(server: Server) -> list[list[int]]:
    """The undisturbed texts, without drafts."""
    with Stream(server.grpc_url) as stream:
        for number, name in enumerate(NAMES):
            stream.send(name, speculation="none", **inputs_of(number))
        return [answer.ids for answer in stream.answers(*NAMES).values()]


def kill(server: Server, model: str) -> None:
    """Kill a model's process as the kernel does when memory runs out."""
    os.kill(pid_of(server, model), signal.SIGKILL)


def await_answer(server: Server) -> None:
    """Wait until the public model answers.

    Triton refuses requests while it loads the model, and connections if it has ended with the process and the launcher
    starts it again.
    """
    body = {name: value for name, value in inputs_of(0).items() if name != "stream"}

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return generate(server.http_url, body).status == 200
        return False

    until(answers, "an answer of the new process")


def harmed(server: Server, model: str, harm: Callable[[], None]) -> list[list[int]]:
    """Do harm to a model in the middle of running requests; return their ids once its process is replaced."""
    before = pid_of(server, model)
    with unless_triton_aborts(server), Stream(server.grpc_url) as stream:
        for number, name in enumerate(NAMES):
            stream.send(name, speculation="draft_model", **inputs_of(number))
        first = [stream.receive() for _ in range(5 * NUM_REQUESTS)]
        assert not any(response.final for response in first), "too late to be under traffic"
        harm()
        answers = stream.answers(*NAMES)
    for response in reversed(first):
        answers[response.id].responses.insert(0, response)
    assert [answer.error for answer in answers.values()] == [""] * NUM_REQUESTS
    await_replaced(server, model, before)
    return [answer.ids for answer in answers.values()]


def await_drafts(server: Server, expected: list[int]) -> None:
    """Wait until a request gets drafts; its text is the same before and after."""

    def num_drafted() -> int:
        answer = ask(server.grpc_url, speculation="draft_model", **inputs_of(1))
        assert answer.ids == expected
        total: int = answer.last["total_draft_tokens"]
        return total

    until(num_drafted, "drafts")


@pytest.mark.parametrize("server", [APART], indirect=True, ids=["apart"])
def test_draft_killed_under_traffic_changes_no_text_and_drafts_again_once_healed(
    served: Server, truth: list[list[int]]
) -> None:
    """Calls that the dead process had taken are never answered; they must not keep the breaker open forever."""
    assert harmed(served, "draft", lambda: kill(served, "draft")) == truth
    await_drafts(served, truth[1])
    assert served.failure() is None


def test_target_killed_under_traffic_is_healed_and_every_text_goes_on(served: Server, truth: list[list[int]]) -> None:
    assert harmed(served, "target", lambda: kill(served, "target")) == truth
    assert ask(served.grpc_url, **inputs_of(2)).ids == truth[2]
    assert served.failure() is None


def test_target_whose_engine_breaks_ends_its_process_and_every_text_goes_on(
    served: Server, script: Path, truth: list[list[int]]
) -> None:
    assert harmed(served, "target", (script / "break").touch) == truth
    assert ask(served.grpc_url, **inputs_of(2)).ids == truth[2]
    assert served.failure() is None and "its state is inconsistent after an internal error" in served.log()


def test_target_killed_while_idle_is_healed_and_the_next_request_served(served: Server, truth: list[list[int]]) -> None:
    dead = pid_of(served, "target")
    kill(served, "target")
    assert ask(served.grpc_url, **inputs_of(3)).ids == truth[3]
    assert pid_of(served, "target") != dead


def test_triton_in_which_a_process_died_under_traffic_is_replaced_and_has_its_threads_back(
    served: Server, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the threads of the calls that it never answers, which only another Triton is without."""
    assert harmed(served, "target", lambda: kill(served, "target")) == truth
    worn = pid_of(served, "tritonserver")
    num_threads = psutil.Process(worn).num_threads()
    monkeypatch.setattr(watchdog, "WORN_DEATHS", 1)
    await_replaced(served, "tritonserver", worn)
    await_ready(served)
    assert ask(served.grpc_url, **inputs_of(2)).ids == truth[2]
    assert psutil.Process(pid_of(served, "tritonserver")).num_threads() < num_threads
    assert served.failure() is None


def test_public_model_killed_is_healed_and_serves_again(served: Server, truth: list[list[int]]) -> None:
    dead = pid_of(served, "speculative")
    kill(served, "speculative")
    await_replaced(served, "speculative", dead)
    await_answer(served)
    assert ask(served.grpc_url, **inputs_of(0)).ids == truth[0]
