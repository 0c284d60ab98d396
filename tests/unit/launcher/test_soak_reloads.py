"""tests/soak_under_faults.py: its reloads, of what a running server can change; which ends of Triton are planned."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.reloader import changed_keys, stamps_of
from launcher.wear import WORN_DEATHS
from orchestrator.core.deployment.config import load_config
from orchestrator.core.deployment.reload_requests import live_keys
from tests import soak_under_faults
from tests.soak_under_faults import (
    GATEWAY,
    IN_TARGET,
    KINDS,
    OWN_PROCESSES,
    RELOAD,
    SIGNALS,
    Chaos,
    End,
    Fault,
    Layout,
    note,
    script,
    write_settings,
)
from tests.support.hanging import until

pytestmark = pytest.mark.unit

NO_GATEWAY: Any = None


def test_each_fault_is_followed_by_a_reload_of_the_other_replica() -> None:
    num_faults = len((*KINDS, GATEWAY)) * len(SIGNALS)
    hurts = list(itertools.islice(script(60.0), 4 * num_faults))
    faults, reloads = hurts[::2], hurts[1::2]
    assert {(kind, way) for _, kind, way in faults} == set(itertools.product((*KINDS, GATEWAY), SIGNALS))
    assert all(reload == (1 - fault[0], "launcher", RELOAD) for fault, reload in zip(faults, reloads, strict=True))
    assert {replica for replica, _, _ in reloads} == {0, 1}
    assert list(script(0.0)) == []
    assert list(script(60.0, times=2)) == hurts


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        (IN_TARGET, ["draft", "max_running", "max_nodes", "remember_tokens"]),
        (OWN_PROCESSES, ["max_running", "remember_tokens"]),
    ],
)
def test_a_running_server_can_change_what_the_reloads_change(tmp_path: Path, layout: Layout, keys: list[str]) -> None:
    for name in ("target", "draft", "draft2", *soak_under_faults.HEADS):
        (tmp_path / name).mkdir()
    configs = []
    for number in range(3):
        write_settings(tmp_path / "serving.toml", number, layout)
        configs.append(load_config(tmp_path / "serving.toml", {}))
    before, after, again = configs
    assert before == again
    changed = changed_keys(before, after, stamps_of(before), stamps_of(after))
    assert sorted(changed) == sorted(keys) and set(changed) <= set(live_keys(before))


def test_every_process_of_a_layout_is_hurt_in_each_way() -> None:
    kinds = {(kind, way) for _, kind, way in script(60.0, 1, OWN_PROCESSES.kinds) if way != RELOAD}
    assert kinds == set(itertools.product((*KINDS, "draft", *soak_under_faults.HEADS, GATEWAY), SIGNALS))


class Launcher:
    """Answers each reload with the next of these."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = iter(answers)

    def request(self, method: str, path: str, limit_s: float) -> tuple[int, str]:
        assert (method, path) == ("PUT", "/reload") and limit_s
        return next(self.answers)


TAKEN, REFUSED, SAME = (200, "reload: max_running 16 -> 12"), (500, "no"), (200, "reload: nothing has changed")


@pytest.mark.parametrize(
    ("answers", "num_wrong"),
    [([TAKEN, TAKEN], 0), ([SAME], 1), ([REFUSED], 1), ([REFUSED, SAME, TAKEN], 1)],
    ids=["taken over", "nothing happened", "refused", "what comes after a refusal is not counted again"],
)
def test_a_reload_that_is_not_taken_over_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, str]], num_wrong: int
) -> None:
    launcher = Launcher(*answers)
    monkeypatch.setattr(soak_under_faults, "LauncherClient", lambda host, port: launcher)
    monkeypatch.setattr(Chaos, "is_well", lambda self, server: True)
    server: Any = SimpleNamespace(
        config_path=tmp_path / "serving.toml", host="127.0.0.1", ports=SimpleNamespace(health=1)
    )
    run = Chaos([server], NO_GATEWAY, [])
    for number in range(len(answers)):
        run.reload(0)
        assert soak_under_faults.SETTINGS[(number + 1) % 2] in server.config_path.read_text()
    assert len(run.wrong) == num_wrong and len(run.reloads) == len(answers)


def test_a_reload_that_meets_the_end_of_triton_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_under_faults, "LauncherClient", lambda host, port: Launcher(REFUSED))
    monkeypatch.setattr(Chaos, "is_well", lambda self, server: True)
    server: Any = SimpleNamespace(
        config_path=tmp_path / "serving.toml", host="127.0.0.1", ports=SimpleNamespace(health=1)
    )
    run = Chaos([server], NO_GATEWAY, [End(0, float("inf"))])
    run.reload(0)
    assert not run.wrong


def test_a_worn_triton_that_the_launcher_replaces_is_told_from_one_that_ends_itself(serving: Any, watched: Any) -> None:
    (watch, triton), lines = serving, watched[2]
    for _ in range(WORN_DEATHS):
        watch._wear.note_death()
    watch.start()
    until(lambda: triton.num_starts == 1 and not watch.is_starting)
    triton.ended = "the server ended by signal 6: lock_exception"
    until(lambda: triton.num_starts == 2 and not watch.is_starting)
    ends: list[End] = []
    for line in lines:
        note(ends, 0, line)
    assert [end.is_planned for end in ends] == [True, False]


def test_only_an_end_that_nobody_wanted_counts_as_triton_s_own() -> None:
    killed, behind_target, worn, other = End(0, 1.0), End(1, 11.0), End(1, 12.0, is_planned=True), End(1, 1.0)
    of_triton, of_target = Fault("tritonserver", "kill", 0, 0.5, 5.0), Fault("target", "kill", 1, 10.0, 5.0)
    run = Chaos([], NO_GATEWAY, [killed, behind_target, worn, other], [of_triton, of_target])
    assert run.ends_behind(of_target) == [behind_target, worn]
    assert run.ended_itself() == [behind_target, other]
