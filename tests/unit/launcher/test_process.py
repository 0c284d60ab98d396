"""What the launcher reads from a log, keeps in a folder and asks of the kernel."""

import fcntl
import os
import resource
import subprocess
import sys
import time
from io import FileIO
from pathlib import Path

import psutil
import pytest

from launcher import log, process, workfolder
from launcher.workfolder import WorkFolder
from orchestrator.core.deployment.stubs import is_alive

LOADING_FAILED = r"""E1121 05:31:31.290172 4102 server.cc:241] "CudaDriverHelper has not been initialized."
E1121 05:31:31.6 4102 backend_model.cc:692] "ERROR: Failed to create instance: ValueError: bad 3\n\nAt:\n  /m.py\n"
E1121 05:31:31.6 4102 model_lifecycle.cc:642] "failed to load 'target' version 1: Internal: {}\n\nAt:\n  /m.py(6): f\n"
error: creating server: Invalid argument - load failed for model 'target': version 1 is at UNAVAILABLE state
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (LOADING_FAILED.format("ValueError: bad 3"), "model target: ValueError: bad 3"),
        (LOADING_FAILED.format("TritonModelException: pool full"), "model target: pool full"),
        (LOADING_FAILED.format(r"KeyError: 'a'\n  two lines"), "model target: KeyError: 'a' two lines"),
        (
            "E1121 05:31:42.8 4252 model_repository_manager.cc:1415] \"failed to poll model 'x': model not found.\"\n"
            "error: creating server: Internal - failed to load all models",
            "model x: model not found.",
        ),
        ('E1 x\nerror: creating server: Internal - "no"', 'Internal - "no'),
        ("stub: error while loading shared libraries: libpython3.12.so.1.0: no\nE1", "libpython3.12.so.1.0: no"),
        ("one\ntwo\n", "two"),
        ("", "it wrote nothing"),
    ],
)
def test_log_cause_is_one_line_without_traceback(text, cause):
    assert log.cause(text).endswith(cause)
    assert "\n" not in log.cause(text) and "At:" not in log.cause(text)


def test_log_follower_hands_out_complete_new_lines_once(tmp_path):
    path = tmp_path / "log"
    path.write_text("old\n")
    follower = log.LogFollower(path)
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert follower.new_text() == "one\n"
        file.write("o\n")
    assert follower.new_text() == "two\n"
    assert follower.new_text() == ""


def test_log_follower_empties_a_long_file_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "MAX_LOG_BYTES", 10)
    path = tmp_path / "log"
    path.touch()
    follower = log.LogFollower(path)
    with path.open("ab", buffering=0) as file:
        file.write(b"a long line\nand")
        assert follower.new_text() == "a long line\n"
        assert path.stat().st_size > 10  # the line that is not complete is not thrown away
        file.write(b" another\n")
        assert follower.new_text() == "and another\n"
        assert path.stat().st_size == 0
        file.write(b"the next\n")
        assert follower.new_text() == "the next\n"


class Chatty(FileIO):
    """A file to which another process writes a line as soon as it has been read."""

    def read(self, size=-1):
        text = super().read(size)
        with FileIO(self.name, "ab") as other:
            other.write(b"written meanwhile\n")
        return text


def test_log_follower_does_not_empty_a_file_that_it_has_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "MAX_LOG_BYTES", 10)
    path = tmp_path / "log"
    path.touch()
    follower = log.LogFollower(path)
    path.write_text("a long line\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Chatty(path, "r+"))
        assert follower.new_text() == "a long line\n"
    assert follower.new_text() == "written meanwhile\n"
    assert path.stat().st_size == 0


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(workfolder.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(workfolder, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path


def test_work_folder_takes_its_regions_along_and_no_others(folders):
    work = WorkFolder()
    own, foreign = folders / "shm" / f"{work.region_prefix}1", folders / "shm" / "foreign"
    own.write_bytes(b"12")
    foreign.touch()
    assert work.regions() == {own.name: 2}
    work.remove()
    assert not own.exists() and not work.path.exists() and foreign.exists()


def test_work_folder_is_locked_against_systemd_tmpfiles(folders):
    """It leaves a folder alone, and everything below it, on which it cannot have the lock."""
    work = WorkFolder()
    cleaner = os.open(work.path, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    work._unlock()
    fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)
    work.remove()


def test_work_folder_sweeps_orphans_but_not_the_living(folders):
    living, killed = WorkFolder(), WorkFolder()
    for work in (living, killed):
        (folders / "shm" / f"{work.region_prefix}1").touch()
    killed._unlock()  # what the kernel does for a killed launcher
    WorkFolder().remove()
    assert list(living.regions()) and living.path.exists()
    assert not killed.regions() and not killed.path.exists()


def test_a_sweep_follows_no_link_and_takes_names_literally(folders):
    """Anybody may make folders and links beside ours."""
    ours, living = folders / "ours", WorkFolder()
    (folders / "specserve-[a-z0-9_]*").mkdir()
    ours.mkdir()
    for folder in (ours, folders / "specserve-[a-z0-9_]*"):
        (folder / "lock").touch()
    (folders / f"{workfolder._PREFIX}link").symlink_to(ours)
    regions = [folders / "shm" / name for name in (f"{living.region_prefix}1", "specserve-link-1")]
    for region in regions:
        region.touch()
    workfolder.sweep()
    assert (ours / "lock").exists() and all(region.exists() for region in regions)
    assert not (folders / "specserve-[a-z0-9_]*").exists()  # an orphan like any other
    living.remove()


def test_work_folder_keeps_a_failed_log_for_a_day(folders):
    work = WorkFolder()
    work.log.write_text("why")
    kept = work.keep_log()
    assert not work.path.exists()
    workfolder.sweep()
    assert kept.read_text() == "why"
    os.utime(kept, (time.time() - 90_000,) * 2)
    workfolder.sweep()
    assert not kept.exists()


def lives(pid):
    return psutil.pid_exists(pid) and is_alive(psutil.Process(pid))


def test_process_stop_ends_a_group_that_ignores_sigterm_within_the_limit(tmp_path):
    script = "trap '' TERM; sleep 60 & echo up; sleep 60 & wait; wait; sleep 60"
    running = process.spawn(["bash", "-c", script], os.environ, tmp_path / "log")
    while "up" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    assert len(process.group_members(running.pid)) >= 2
    began = time.monotonic()
    assert process.stop(running, 0.3) is False
    assert time.monotonic() - began < 5
    assert process.group_members(running.pid) == []


def test_process_dies_with_the_one_that_started_it(tmp_path):
    code = (
        "import os, pathlib, sys; from launcher import process\n"
        f"p = process.spawn(['sleep', '60'], os.environ, pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "print(p.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=30, check=False
    )
    child, end = int(answer.stdout), time.monotonic() + 5
    while (alive := lives(child)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive


def test_process_may_open_as_many_files_as_the_system_allows(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        started = process.spawn(["bash", "-c", "ulimit -Sn; ulimit -Hn"], os.environ, tmp_path / "log")
        assert started.wait(10) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    now, most = (tmp_path / "log").read_text().split()
    assert now == most != "256"
