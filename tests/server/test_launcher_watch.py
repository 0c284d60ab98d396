"""The launcher over the real tritonserver: processes that die."""

import os
import re
import signal
import threading
import time

import pytest

from launcher import process, watchdog, workfolder
from tests.support.clients import until
from tests.support.deaths import pid_of
from tests.support.throwaway import (
    answers_from_another,
    infer,
    launched,
    make_deployment,
    region_of,
    server_of,
    url_in,
)

pytestmark = pytest.mark.server


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    return make_deployment(tmp_path, monkeypatch)


@pytest.fixture
def running(deployment):
    with launched(deployment) as started:
        yield started


def test_command_dead_stub_is_healed_and_the_stop_stays_clean(deployment, running):
    started, line = running
    url, regions = url_in(line), []
    for _ in range(2):
        stub = infer(url, 0)
        regions.append(region_of(url))
        os.kill(stub, signal.SIGKILL)
        until(lambda stub=stub: answers_from_another(url, stub), "another stub", 30)
    assert infer(url, 1) == 6
    group = server_of(started.pid)
    began = time.monotonic()
    started.terminate()
    _, errors = started.communicate(timeout=40)
    assert time.monotonic() - began < 20
    assert started.returncode == 0
    assert re.findall(r"model target: (its process died|reloaded)", errors) == ["its process died", "reloaded"] * 2
    assert process.group_members(group) == []
    assert deployment.leaves_nothing(*regions)


def test_server_request_under_way_when_its_stub_dies_fails_and_the_next_is_served(deployment):
    errors = []

    def slow(url):
        try:
            infer(url, -30)
        except OSError as error:
            errors.append(error)

    with deployment.server() as server:
        stub = infer(server.http_url, 0)
        waiting = threading.Thread(target=slow, args=(server.http_url,))
        waiting.start()
        time.sleep(0.5)
        os.kill(stub, signal.SIGKILL)
        waiting.join(15)
        assert errors and not waiting.is_alive()
        until(lambda: answers_from_another(server.http_url, stub), "another stub", 30)


def test_command_model_that_cannot_be_healed_ends_the_launcher(deployment, running):
    started, line = running
    stub = infer(url_in(line), 0)
    deployment.add("target", loading="raise ValueError('broken meanwhile')")
    group = server_of(started.pid)
    os.kill(stub, signal.SIGKILL)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 1
    assert "model target could not be reloaded:" in errors and "broken meanwhile" in errors.splitlines()[-1]
    assert "At:" not in errors.splitlines()[-1]
    assert process.group_members(group) == []


def test_command_model_that_keeps_dying_ends_the_launcher(deployment, running):
    started, line = running
    stub = infer(url_in(line), 0)
    deployment.add("target", loading="import threading; threading.Timer(0.3, os._exit, [1]).start()")
    os.kill(stub, signal.SIGKILL)
    _, errors = started.communicate(timeout=90)
    assert started.returncode == 1
    assert "error: model target died 5 times within a minute" in errors


def test_command_server_that_dies_is_started_again_and_too_often_ends_the_launcher(deployment, running):
    started, line = running
    url, region = url_in(line), region_of(url_in(line))
    while started.poll() is None:
        stub = infer(url, 0)
        os.kill(server_of(started.pid), signal.SIGKILL)
        until(lambda stub=stub: started.poll() is not None or answers_from_another(url, stub), "a server or the end")
    _, errors = started.communicate(timeout=30)
    assert started.returncode == 1
    assert len(re.findall(r"; starting it again", errors)) == 3
    assert "the server is ready again after" in errors
    # A kill may come while the launcher still asks whether the server is ready.
    assert re.search(r"^\S+Z error: the server (ended by signal 9|did not start)", errors.splitlines()[-1])
    assert deployment.leaves_nothing(region)


def test_server_in_which_many_processes_have_died_is_replaced_when_it_is_idle(deployment, monkeypatch):
    monkeypatch.setattr(watchdog, "WORN_DEATHS", 2)
    with deployment.server() as server:
        (worn,) = [pid for pid, name in server.pids().items() if name == "tritonserver"]
        for _ in range(2):
            assert worn in server.pids()
            stub = infer(server.http_url, 0)
            os.kill(stub, signal.SIGKILL)
            until(lambda stub=stub: answers_from_another(server.http_url, stub), "another stub", 60)
        until(lambda: worn not in server.pids() and server.why_not_ready() is None, "another server", 60)
        assert infer(server.http_url, 1) == 6
        assert server.failure() is None and not server.drain.is_requested


def test_server_is_live_and_not_ready_while_it_is_started_again(deployment, tmp_path):
    """Not live would make a supervisor restart it meanwhile, which only loses time."""
    flag = tmp_path / "flag"
    slow = f"import pathlib; pathlib.Path({str(flag)!r}).exists() and time.sleep(3)"
    deployment.add("target", loading=slow)
    with deployment.server() as server:
        flag.touch()
        dead = pid_of(server, "tritonserver")
        os.kill(dead, signal.SIGKILL)
        until(lambda: server.why_not_ready() == "the server has ended and is being started again", "the restart", 30)
        assert server.why_not_live() is None
        until(lambda: server.why_not_ready() is None, "a ready server", 30)


def test_server_stopped_while_it_is_started_again_leaves_nothing(deployment, tmp_path):
    flag = tmp_path / "flag"
    deployment.add("target", loading=f"import pathlib; pathlib.Path({str(flag)!r}).exists() and time.sleep(60)")
    with deployment.server() as server:
        region = region_of(server.http_url)
        flag.touch()
        dead = pid_of(server, "tritonserver")
        os.kill(dead, signal.SIGKILL)

        def others():
            return {pid for pid, name in server.pids().items() if name == "tritonserver"} - {dead}

        (group,) = until(others, "another server", 30)
    assert process.group_members(group) == []
    assert deployment.leaves_nothing(region)


def test_command_sigkill_of_the_launcher_leaves_no_server(deployment, running):
    started, line = running
    group, region = server_of(started.pid), region_of(url_in(line))
    started.kill()
    started.communicate(timeout=10)
    until(lambda: not process.group_members(group), "the end of the server", 20)
    workfolder.sweep()  # what the next launcher does first
    assert deployment.leaves_nothing(region)
