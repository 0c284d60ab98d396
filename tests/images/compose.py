"""Checks the services of docker/compose.yaml on images that are already built: starts, asks, kills and stops them.

The services are two servers, the gateway in front of them, and Prometheus, whose image is replaced, under its name, by
one with Debian's package. Nothing can replace Grafana's image, so that service is left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.images.checks import CheckFailed, check_kill, get, num_usable, streamed, succeeds, wait_for
from tests.images.engine import ROOT, Engine

FILE = ROOT / "docker" / "compose.yaml"
PROJECT = "specserve-check"
SERVICES = ("server", "gateway", "prometheus")
GATEWAY, PROMETHEUS_PORT = ("127.0.0.1", 9000), 9090
READY_LIMIT_S, SCRAPE_LIMIT_S = 180.0, 60.0


def image_of(service: str) -> str:
    """Return the image that the file names for a service."""
    return str(_file()["services"][service]["image"])


def check_compose(engine: Engine, folder: Path) -> None:
    """Start the services, check their metrics and a stream whose server is killed, and stop them.

    folder: where a copy of the file is written, without its key `name`, which docker-compose 1 does not know.
    """
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in _file().items() if key != "name"}), encoding="utf-8")
    options = ("--project-name", PROJECT, "--project-directory", str(FILE.parent), "--file", str(file))
    with _services(partial(engine.run, "docker-compose", *options)) as compose:
        took_s = wait_for(lambda: num_usable(*GATEWAY) == 2, "two servers behind the gateway", READY_LIMIT_S)
        print(f"compose: two servers, the gateway and Prometheus are ready after {took_s:.1f} s more", flush=True)
        wait_for(lambda: _are_scraped(2), "Prometheus to scrape server and gateway", SCRAPE_LIMIT_S)
        undisturbed = streamed(*GATEWAY)
        (gateway,) = _addresses(engine, "gateway").values()  # the gateway's metrics are only there
        servers = _addresses(engine, "server")
        killed = check_kill(gateway, GATEWAY[1], servers, lambda name: engine("kill", name), undisturbed)
        print(f"compose: {len(undisturbed)} characters, the same from {killed}, which was killed meanwhile", flush=True)
        compose("stop")
        _check_stopped(engine, killed)


def _file() -> dict[str, Any]:
    file: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return file


@contextlib.contextmanager
def _services(compose: Callable[..., str]) -> Iterator[Callable[..., str]]:
    """Start the services; at the end, remove their containers, networks and volumes."""
    try:
        compose("up", "--detach", "--scale", "server=2", *SERVICES)
        yield compose
    except BaseException:
        print(compose("logs", "--tail=30"), flush=True)
        raise
    finally:
        compose("down", "--volumes")


def _are_scraped(num_jobs: int) -> bool:
    """Return whether Prometheus has read `num_jobs` of the file's jobs and evaluates every rule."""
    if not succeeds(lambda: get(PROMETHEUS_PORT, "/api/v1/targets")):
        return False
    targets = json.loads(get(PROMETHEUS_PORT, "/api/v1/targets")[1])["data"]["activeTargets"]
    groups = json.loads(get(PROMETHEUS_PORT, "/api/v1/rules")[1])["data"]["groups"]
    is_evaluated = bool(groups) and all(rule["health"] == "ok" for group in groups for rule in group["rules"])
    return is_evaluated and sum(target["health"] == "up" for target in targets) == num_jobs


def _addresses(engine: Engine, service: str) -> dict[str, str]:
    """Return the addresses of a service's containers by name."""
    names = engine("ps", "--format", "{{.Names}}", "--filter", f"name={PROJECT}_{service}_").split()
    address = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return {name: engine("inspect", "--format", address, name) for name in names}


def _check_stopped(engine: Engine, killed: str) -> None:
    """Check that the killed server has ended with status 137, and all others with 0."""
    containers = engine("ps", "--all", "--quiet", "--filter", f"name={PROJECT}_").split()
    ends = dict(
        line.removeprefix("/").split()
        for line in engine("inspect", "--format", "{{.Name}} {{.State.ExitCode}}", *containers).splitlines()
    )
    if len(ends) != len(SERVICES) + 1 or any(
        status != ("137" if name == killed else "0") for name, status in ends.items()
    ):
        raise CheckFailed(f"{killed} was killed, and the services ended with {ends}")
    print("compose: stopped, each with status 0", flush=True)
