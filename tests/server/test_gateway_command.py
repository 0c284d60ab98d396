"""`python -m gateway --serve`: server and gateway together; a killed server comes back, and the end leaves nothing."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.conftest import deployment
from tests.support.clients import until

pytestmark = pytest.mark.server
ROOT = Path(__file__).resolve().parents[2]
FREE_PORTS = {f"SPECSERVE_{port}_PORT": "0" for port in ("HTTP", "GRPC", "METRICS", "HEALTH")}
BODY = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def start(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", "--serve", str(config), "--port", "0", "--recovery-limit-s", "100"],
        cwd=ROOT,
        env=os.environ | FREE_PORTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def ended(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_serves_comes_back_and_leaves_nothing(linked: Path) -> None:
    with start(deployment(linked)) as process:
        try:
            assert process.stdout and "ready in" in process.stdout.readline()
            address = re.search(r"http://[\d.]+:\d+/v1", process.stdout.readline())
            assert address
            first = httpx.post(f"{address[0]}/completions", json=BODY, timeout=60).json()
            (server,) = [child for child in family(process) if child.name() == "tritonserver"]
            os.killpg(server.pid, signal.SIGKILL)
            # The request waits for the server that the gateway starts again.
            again = httpx.post(f"{address[0]}/completions", json=BODY, timeout=120).json()
            assert again["choices"] == first["choices"] and len(first["choices"][0]["text"]) > 0
            left = family(process)
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
    assert status == 0
    until(lambda: ended(left), "the end of all processes")


def test_ends_while_it_starts(linked: Path) -> None:
    with start(deployment(linked)) as process:
        try:
            until(lambda: [child for child in family(process) if child.name() == "tritonserver"], "a server")
            left = family(process)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    until(lambda: ended(left), "the end of all processes")
