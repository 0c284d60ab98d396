"""Slots of running sequences that processes share."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.deployment import slots as module
from orchestrator.core.deployment.slots import Share, Slots, num_running
from tests.support.hanging import WAIT_S


def test_the_limit_holds_for_all_processes_together(tmp_path: Path) -> None:
    here, there = Slots(tmp_path, 3), Slots(tmp_path, 3)
    taken = here.take(2, "", 1, 0.0)
    assert len(taken) == 2 and not there.take(2, "", 1, 0.0) and len(there.take(1, "", 1, 0.0)) == 1
    assert num_running(tmp_path) == 3 and not here.take(1, "", 1, 0.0)
    here.give_back(taken)
    assert num_running(tmp_path) == 1 and len(there.take(2, "", 1, 0.0)) == 2


def test_no_slot_is_taken_in_a_folder_without_a_server(tmp_path: Path) -> None:
    assert num_running(tmp_path / "state") == 0


def test_a_tenant_has_one_share_in_all_processes(tmp_path: Path) -> None:
    here, there = Slots(tmp_path, 8), Slots(tmp_path, 8)
    first = here.take(2, "x", 10, 0.0)
    assert there.take(1, "x", 5, 0.0) and there.take(3, "y", 7, 0.0)
    assert here.share_of("x") == there.share_of("x") == Share(3, 25) and here.share_of("z") == Share()
    here.give_back(first)
    assert here.share_of("x") == there.share_of("x") == Share(1, 5)


def test_a_request_that_waits_goes_before_later_ones_of_the_other_process(tmp_path: Path) -> None:
    here, there = Slots(tmp_path, 2), Slots(tmp_path, 2)
    assert there.take(1, "", 1, 1.0) and not here.take(2, "", 1, 2.0)
    here.wait_for(2.0)
    assert not there.take(1, "", 1, 3.0), "it would fit, but the wide one has waited for longer"
    assert there.take(1, "", 1, 1.5), "its turn is earlier"
    here.wait_for(math.inf)
    assert not there.take(1, "", 1, 3.0), "there is none"


def test_a_turn_of_a_process_that_is_stopped_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Slots(tmp_path, 2), Slots(tmp_path, 2)
    here.wait_for(1.0)
    assert not there.take(1, "", 1, 2.0)
    monkeypatch.setattr(module, "STALE_S", -1.0)
    assert there.take(1, "", 1, 2.0)


def test_files_are_closed_with_their_owner(tmp_path: Path) -> None:
    slots = Slots(tmp_path, 3)
    slots.take(1, "", 1, 0.0)

    def opened() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [str(link.readlink()) for link in links if tmp_path in link.readlink().parents]

    assert len(opened()) == 3 + 1
    del slots
    gc.collect()
    assert not opened()


def test_slots_of_a_process_that_was_killed_are_free_again(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        "from orchestrator.core.deployment.slots import Slots\n"
        f"slots = Slots(pathlib.Path({str(tmp_path)!r}), 2)\n"
        "print(len(slots.take(2, 'x', 2, 0.0)), flush=True)\n"
        "time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdout.readline() == "2\n"
    here = Slots(tmp_path, 2)
    assert here.share_of("x") == Share(2, 4) and not here.take(1, "", 1, 0.0)
    other.kill()
    other.communicate(timeout=WAIT_S)
    assert here.share_of("x") == Share() and len(here.take(2, "", 1, 0.0)) == 2
