"""Ports: taken before a server is started, with an error of one line; metrics on one of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

import gateway.__main__ as command
from gateway.listening import address_of, bound, listen, metrics_served
from gateway.metrics import Metrics
from gateway.settings import SettingsError
from tests.support.clients import until
from tests.unit.gateway.test_tokenizer import write

pytestmark = pytest.mark.unit


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_taken_port_ends_the_command_before_a_server_is_started(
    flag: str, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "serving", lambda *_: pytest.fail("servers were started"))
    monkeypatch.setattr(command, "target_of", lambda _: str(write(tmp_path)))

    assert command.main(["--serve", "serving.toml", "--port", "0", flag, str(taken)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot listen on 127.0.0.1:{taken}: ") and flag in line


def test_of_two_gateways_that_start_at_once_the_second_is_told() -> None:
    with bound("127.0.0.1", 0, "port") as first, bound("127.0.0.1", first.getsockname()[1], "port") as second:
        listen(first, "port", 1)
        with pytest.raises(SettingsError, match="GATEWAY_PORT"):
            listen(second, "port", 1)


def test_addresses_that_a_client_can_use() -> None:
    with bound("0.0.0.0", 0, "port") as everywhere:
        assert address_of(everywhere) == f"127.0.0.1:{everywhere.getsockname()[1]}"
    with contextlib.suppress(SettingsError), bound("::1", 0, "port") as local:  # a machine may lack IPv6
        assert address_of(local) == f"[::1]:{local.getsockname()[1]}"


def test_metrics_on_a_port_of_their_own() -> None:
    metrics = Metrics()
    metrics.steps.inc(7)
    with metrics_served(metrics.registry, "127.0.0.1", 0) as port:
        assert "spec_gateway_spec_decode_num_drafts_total 7.0" in httpx.get(f"http://127.0.0.1:{port}/metrics").text


def test_a_server_does_not_outlive_a_gateway_that_is_killed(tmp_path: Path) -> None:
    package = tmp_path / "launcher"
    package.mkdir()
    (package / "__init__.py").touch()  # goes before the real one
    (package / "__main__.py").write_text("import pathlib, time\npathlib.Path('runs').touch()\ntime.sleep(600)\n")
    code = (
        "import os; from pathlib import Path; from gateway.local import LocalReplica\n"
        "replica = LocalReplica(Path('serving.toml'), os.environ); print(replica.process.pid, flush=True)\n"
        "replica.process.wait()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout
        server = psutil.Process(int(gateway.stdout.readline()))
        try:
            until((tmp_path / "runs").exists, "a launcher")
            gateway.send_signal(signal.SIGKILL)
            gateway.wait(20)
            until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the launcher's end")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)
