"""The watch over a server's processes, without a server."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from launcher import watch as module
from launcher.admin import AdminError, NoAnswer
from launcher.triton_process import StartError
from launcher.watch import Watch, reload_limit_s
from orchestrator.core.deployment.heartbeat import Heartbeat
from orchestrator.core.deployment.stubs import is_alive
from tests.support.hanging import until
from tests.unit.launcher.conftest import BEATING


def test_an_exception_is_counted_and_the_watch_goes_on(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the thread, and nobody noticed."""
    watch, admin, lines = watched
    admin.error = ValueError("a bug")
    watch.start()
    until(lambda: watch.num_errors >= 2)
    assert "failed 1 times, continuing: ValueError('a bug')" in "\n".join(lines)
    assert watch.is_alive() and watch.failure is None
    admin.error = None
    until(lambda: any("reloaded in" in line for line in lines))


def test_a_model_that_cannot_be_reloaded_ends_the_watch(watched: Any) -> None:
    watch, admin, _ = watched
    admin.error = AdminError("models/target/load: no")
    watch.start()
    watch.join(10)
    assert watch.failure == "model target could not be reloaded: models/target/load: no"
    assert admin.reloaded == ["target"] * 2


def test_no_model_is_reloaded_while_triton_does_not_answer(watched: Any) -> None:
    """Killed together with its processes, it is still there for a moment when they are gone."""
    watch, admin, _ = watched
    answers, asked = iter([*[False] * 16, *[True] * 1000]), list[int]()
    admin.is_live = lambda: next(answers, True)
    admin.reload = lambda model, limit_s: asked.append(1000 - len(list(answers)))
    watch.start()
    until(lambda: asked)
    assert asked[0] > 0 and watch.failure is None


def test_a_reload_that_a_triton_refuses_because_it_ends_is_no_failed_reload(watched: Any) -> None:
    watch, admin, lines = watched
    admin.error = AdminError("models/target/unload: Connection refused")
    answers = iter([True, False] * 3)  # at the beginning of a poll, and after a refusal
    admin.is_live = lambda: next(answers, False)
    watch.start()
    until(lambda: len(admin.reloaded) >= 3)
    assert watch.failure is None and not any("could not" in line for line in lines)


def test_a_model_that_keeps_dying_ends_the_watch(watched: Any) -> None:
    watch, admin, _ = watched
    watch.start()
    watch.join(10)
    assert watch.failure == "model target died 5 times within a minute" and admin.reloaded == ["target"] * 4


def test_a_process_that_beats_is_left_alone_and_one_that_hangs_is_killed_and_healed(
    watched: Any, beating: psutil.Process
) -> None:
    watch, admin, lines = watched
    watch._stubs = {beating: "target"}
    watch.start()
    time.sleep(0.5)
    assert beating.is_running() and not admin.reloaded and not watch.silent_models()
    beating.suspend()
    until(lambda: admin.reloaded)
    assert not is_alive(beating)
    assert any("target: its process has been silent for" in line for line in lines)


def test_a_process_that_another_thread_kills_is_healed(watched: Any, beating: psutil.Process) -> None:
    watch, admin, _ = watched
    watch._stubs = {beating: "target"}
    watch.start()
    watch.kill(2**22 + 1)  # it has ended already, and is healed for that
    watch.kill(beating.pid)
    until(lambda: admin.reloaded)
    assert not is_alive(beating) and watch.num_errors == 0


#: Asks for a replacement at once, and goes on.
WORN = BEATING.replace("import Heartbeat", "import Heartbeat, ask_for_replacement").replace(
    "while True:", "ask_for_replacement(pathlib.Path(sys.argv[1]))\nwhile True:"
)


def test_a_process_that_asks_for_a_replacement_is_killed_behind_the_reload_of_its_model(
    watched: Any, tmp_path: Path
) -> None:
    watch, admin, lines = watched
    watch._python_models = set()
    with subprocess.Popen([sys.executable, "-c", WORN, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        worn, was_alive = psutil.Process(process.pid), list[bool]()
        admin.reload = lambda model, limit_s: was_alive.append(is_alive(worn))
        watch._stubs = {worn: "target"}
        watch.start()
        until(lambda: not is_alive(worn))
    assert was_alive == [True]
    assert lines[0] == "model target: its process asks to be replaced, reloading"


#: Starts a process that beats, prints its id, and never reaps it, as Triton does.
NOT_REAPING = """
import subprocess, sys, time
beating = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE)
beating.stdout.readline()
print(beating.pid, flush=True)
time.sleep(60)
"""


def test_a_hanging_process_is_replaced_at_once_even_if_it_is_not_reaped(watched: Any, tmp_path: Path) -> None:
    """To wait for its end took five seconds and raised an exception."""
    watch, admin, _ = watched
    command = [sys.executable, "-c", NOT_REAPING, BEATING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        beating = psutil.Process(int(parent.stdout.readline()))
        beating.suspend()
        watch._stubs = {beating: "target"}
        watch.start()
        until(lambda: admin.reloaded)
        assert beating.status() == psutil.STATUS_ZOMBIE and watch.num_errors == 0
        parent.kill()


def test_a_process_without_a_first_heartbeat_does_not_count_as_silent(tmp_path: Path) -> None:
    """It may still be loading, or be none of ours."""
    silence = module.Silence(tmp_path)
    assert [silence.poll(psutil.Process()) for _ in range(3)] == [0, 0, 0]
    Heartbeat(tmp_path).beat()
    assert [silence.poll(psutil.Process()) for _ in range(3)] == [0, 1, 2]


def test_a_silent_model_is_named_before_it_is_killed(
    watched: Any, beating: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, _, _ = watched
    monkeypatch.setattr(module, "_SILENT_S", 0.02)
    watch._hang_limit_s = 1e9
    watch._stubs = {beating: "target"}
    beating.suspend()
    watch.start()
    until(lambda: watch.silent_models().get("target", 0) > 0.02)
    beating.resume()
    until(lambda: not watch.silent_models())


def test_triton_that_does_not_answer_a_reload_is_killed_and_started_again(watched: Any) -> None:
    watch, admin, lines = watched
    watch._python_models = {"draft", "target"}
    admin.error = NoAnswer("models/draft/load: no answer for 1 s")
    watch.start()
    until(lambda: watch._triton.num_starts)
    admin.error = None
    assert lines[1] == "model draft could not be reloaded: models/draft/load: no answer for 1 s; killing Triton"
    assert admin.reloaded[:1] == ["draft"] and watch.failure is None


def test_triton_that_a_signal_ended_is_started_again_and_gives_up_the_fourth_time(serving: Any) -> None:
    watch, triton = serving
    triton.ended, triton.is_fragile = "the server ended by signal 6: lock_exception", True
    watch.start()
    watch.join(10)
    assert triton.num_starts == 3 and watch.failure == triton.ended


def test_triton_that_ends_by_itself_is_not_started_again(serving: Any) -> None:
    watch, triton = serving
    triton.ended, triton.is_killed = "the server ended with status 1: no memory", False
    watch.start()
    watch.join(10)
    assert triton.num_starts == 0 and watch.failure == triton.ended


def test_triton_that_does_not_come_up_again_ends_the_watch(serving: Any) -> None:
    watch, triton = serving
    triton.ended, triton.error = "the server ended by signal 6: lock_exception", StartError("not ready after 180 s")
    watch.start()
    watch.join(10)
    assert watch.failure == "not ready after 180 s" and not watch.is_starting and triton.num_starts == 3


def test_triton_whose_start_fails_for_a_while_is_started_once_more(serving: Any, watched: Any) -> None:
    watch, triton = serving
    triton.ended, triton.error = "the server ended by signal 6: lock_exception", StartError("address already in use")
    lines = watched[2]
    watch._say = lambda line: (lines.append(line), setattr(triton, "error", None)) if "in use" in line else None
    watch.start()
    until(lambda: triton.num_starts == 2)
    assert lines == ["address already in use; starting it again"] and watch.failure is None


def test_triton_that_does_not_answer_is_killed_at_the_limit_and_started_again(serving: Any, watched: Any) -> None:
    watch, triton = serving
    _, admin, lines = watched
    admin.answers = False
    began_s = time.monotonic()
    watch.start()
    until(lambda: triton.num_starts)
    assert any("Triton has not answered for 0.2 s, killing it (SPECSERVE_HANG_LIMIT_S)" in line for line in lines)
    assert time.monotonic() - began_s >= 0.19, "a look that fails at once counts for the time that it took"


def test_a_pause_of_the_launcher_counts_no_more_than_the_limit_of_an_answer(
    serving: tuple[Watch, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, _ = serving
    clock = iter([0.0, 3600.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    watch._admin.answers = False
    watch._hang_limit_s = 60.0
    watch._end_silent_server()
    assert watch._unanswered_s <= module._POLL_S + module.ANSWER_LIMIT_S
    watch.end()
    watch.start()  # the fixture waits for its end


@pytest.mark.parametrize(
    ("started_in_s", "ready_limit_s", "limit_s"),
    [(5.0, 180.0, 60.0), (20.0, 180.0, 80.0), (300.0, 600.0, 600.0), (5.0, 10.0, 10.0)],
)
def test_a_reload_may_take_longer_than_the_start_but_not_for_ever(
    started_in_s: float, ready_limit_s: float, limit_s: float
) -> None:
    assert reload_limit_s(started_in_s, ready_limit_s) == limit_s
