"""Servers that the gateway's command starts: one that ends again and again is started ever more rarely."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gateway import local
from gateway.local import LocalReplica, restart_pause_s, serving, target_of
from gateway.settings import SettingsError
from tests.support.clients import until

pytestmark = pytest.mark.unit

#: A launcher that is ready the first time, and then ends at once with an error.
LAUNCHER = """\
import pathlib
runs = pathlib.Path("runs")
is_first = not runs.exists()
with runs.open("a") as file:
    file.write("x")
if is_first:
    print("ready: http://127.0.0.1:1, gRPC 127.0.0.1:2, metrics http://127.0.0.1:3/metrics", flush=True)
raise SystemExit(3)
"""


def test_pauses_double_up_to_the_longest() -> None:
    assert [restart_pause_s(number) for number in (1, 2, 3, 5, 6, 99999)] == [1, 2, 4, 16, 30, 30]


def test_at_least_one_server_is_started() -> None:
    with pytest.raises(SettingsError, match="at least 1 server must be started, got 0"), serving("serving.toml", 0):
        pass


def test_the_target_of_a_deployment_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "serving.toml").write_text('target = "some/model"', encoding="utf-8-sig")
    assert target_of(str(tmp_path / "serving.toml")) == "some/model"


def test_a_server_that_cannot_be_started_for_a_while_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures, real = [OSError(11, "no further process"), OSError(12, "no memory")], LocalReplica._start
    replica = launched(tmp_path, monkeypatch)

    def start(given: LocalReplica) -> Any:
        if failures:
            raise failures.pop()
        return real(given)

    try:
        monkeypatch.setattr(LocalReplica, "_start", start)
        replica.wait_until_ready()
        until(lambda: len((tmp_path / "runs").read_text()) >= 2, "the second start", 20)
    finally:
        replica.stop()
    assert "cannot be started: [Errno 12] no memory" in caplog.text and not failures


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LocalReplica:
    package = folder / "launcher"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(LAUNCHER)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(local, "RESTART_PAUSE_S", 0.01)
    return LocalReplica(Path("serving.toml"), {"PATH": "/usr/bin", "PYTHONPATH": str(folder)})


def test_a_server_that_keeps_ending_gets_longer_pauses_and_a_line_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = launched(tmp_path, monkeypatch)
    try:
        assert replica.wait_until_ready().startswith("ready")
        until(lambda: len((tmp_path / "runs").read_text()) >= 4, "the fourth start", 20)
    finally:
        replica.stop()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    ends = ["0.01 s", "0.02 s", "0.04 s"]
    for number, (line, pause) in enumerate(zip(lines[:3], ends, strict=True), 1):
        assert "127.0.0.1:2 ended" in line and "exit status 3" in line
        assert f"failure {number} in a row" in line and line.endswith(f"started again in {pause}")
