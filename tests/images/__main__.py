"""`make docker-check`: builds the images on a container engine of its own, runs them, and prints what it saw.

No base image is pulled; each is replaced under its own name: Debian's by a root file system from debootstrap, NVIDIA's
by the same with Triton from its wheel. At the end everything is removed: containers, images, the engine and its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.images.checks import CheckFailed, get, succeeds, wait_for
from tests.images.compose import check_compose, image_of
from tests.images.engine import (
    DEBIAN,
    NVIDIA,
    PROMETHEUS,
    ROOT,
    Engine,
    build_base,
    engine_of_our_own,
    import_debian,
    index_of_torch,
)
from tests.images.pods import check_pods

#: Image, as the Makefile names it → its Dockerfile and its base image.
IMAGES = {
    "cpu": ("docker/Dockerfile.cpu", DEBIAN),
    "gateway": ("docker/Dockerfile.gateway", DEBIAN),
    "torch": ("docker/Dockerfile", "nvcr.io/nvidia/tritonserver:26.07-py3"),
    "trtllm": ("docker/Dockerfile.trtllm", "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"),
}
#: The ports of the server that is run here, by the launcher's variables; then the gateway's.
PORTS = {"HTTP": 18000, "GRPC": 18001, "METRICS": 18002, "HEALTH": 18003}
GATEWAY_PORT = 19000
CONFINED = ("--read-only", "--tmpfs=/tmp", "--shm-size=1g", "--cap-drop=ALL", "--security-opt=no-new-privileges")
READY_LIMIT_S, STOP_LIMIT_S = 180.0, 60.0
#: Programs that must be installed.
PROGRAMS = ("docker", "dockerd", "debootstrap")
#: The images that Compose and pods run, and the programs that this needs.
TOGETHER = {"cpu", "gateway"}
PROGRAMS_TOGETHER = ("docker-compose", "podman", "catatonit", "runc", "kubectl")


def build(engine: Engine, name: str, *arguments: str) -> str:
    """Build an image; return its tag."""
    tag = f"specserve-check-{name}"
    began_s = time.monotonic()
    engine("build", "--network=host", "--file", IMAGES[name][0], "--tag", tag, *arguments, ".")
    mib = int(engine("image", "inspect", "--format", "{{.Size}}", tag)) / 2**20
    base = int(engine("image", "inspect", "--format", "{{.Size}}", IMAGES[name][1])) / 2**20
    print(
        f"{name}: built in {time.monotonic() - began_s:.0f} s, {mib:.0f} MiB, of which the base {base:.0f}", flush=True
    )
    return tag


@contextlib.contextmanager
def running(engine: Engine, tag: str, ready: tuple[int, str], *arguments: str) -> Iterator[str]:
    """Run an image, confined; yield the container when it is ready. At the end SIGTERM must stop it with status 0."""
    volume = f"--volume={ROOT}/models:/models:ro"
    container = engine("run", "--detach", "--network=host", *CONFINED, volume, *arguments, tag)
    try:
        after_s = wait_for(lambda: _is_ready(engine, container, *ready), f"{tag} to be ready", READY_LIMIT_S)
        print(f"{tag}: ready after {after_s:.1f} s", flush=True)
        _check_confined(engine, container)
        yield container
        began_s = time.monotonic()
        engine("stop", f"--time={STOP_LIMIT_S:.0f}", container)
        status = engine("inspect", "--format", "{{.State.ExitCode}}", container)
        print(f"{tag}: stopped in {time.monotonic() - began_s:.1f} s with status {status}", flush=True)
        if status != "0":
            raise CheckFailed(f"{tag} ended with status {status}")
    except BaseException:
        print(engine("logs", "--tail=30", container), flush=True)
        raise
    finally:
        engine("rm", "--force", container)


def _is_ready(engine: Engine, container: str, port: int, path: str) -> bool:
    if engine("inspect", "--format", "{{.State.Running}}", container) != "true":
        raise CheckFailed(f"the container ended: {engine('logs', '--tail=5', container)}")
    return succeeds(lambda: get(port, path)) and get(port, path)[0] == 200


def _check_confined(engine: Engine, container: str) -> None:
    """Check that the user is not root, that the root file system is read-only, and that the health check passes."""
    if engine("exec", container, "id", "-u") != "1000":
        raise CheckFailed("the container does not run as user 1000")
    if succeeds(lambda: engine("exec", container, "touch", "/app/written")):
        raise CheckFailed("the container's root can be written")
    health = "{{.State.Health.Status}}"
    wait_for(lambda: engine("inspect", "--format", health, container) == "healthy", "the health check", 60)


def check_server(engine: Engine, tag: str, *variables: str) -> None:
    """Run a server, ask it, drain it while a request runs, and stop it."""
    environ = [f"--env=SPECSERVE_{name}_PORT={port}" for name, port in PORTS.items()]
    with running(engine, tag, (PORTS["HEALTH"], "/ready"), *environ, *(f"--env={v}" for v in variables)) as server:
        _ask(PORTS["HTTP"], "/v2/models/speculative/generate", {"text_input": "def f(", "max_tokens": 8})
        print(f"{tag}: {engine('exec', server, 'python', '-m', 'launcher.drain', '--limit-s=30')!r}", flush=True)
        if get(PORTS["HEALTH"], "/ready")[0] != 503:
            raise CheckFailed("a server that drains says that it is ready")
        engine("exec", server, "python", "-m", "launcher.drain", "--cancel")


def check_gateway(engine: Engine, server: str, gateway: str) -> None:
    """Run a server with the gateway in front of it; ask the gateway."""
    environ = [f"--env=SPECSERVE_{name}_PORT={port}" for name, port in PORTS.items()]
    replicas = f"--env=GATEWAY_REPLICAS=127.0.0.1:{PORTS['GRPC']}"
    with (
        running(engine, server, (PORTS["HEALTH"], "/ready"), *environ),
        running(engine, gateway, (GATEWAY_PORT, "/ready"), replicas, f"--env=GATEWAY_PORT={GATEWAY_PORT}"),
    ):
        model = json.loads(get(GATEWAY_PORT, "/v1/models")[1])["data"][0]["id"]
        _ask(GATEWAY_PORT, "/v1/completions", {"model": model, "prompt": "def f(", "max_tokens": 8})


def _ask(port: int, path: str, body: object) -> None:
    status, text = get(port, path, body)
    if status != 200:
        raise CheckFailed(f"{path}: {status} {text}")
    print(f"{path}: {text[:160]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and run the named images; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", nargs="*", default=list(IMAGES), metavar="IMAGE", help=f"of {', '.join(IMAGES)}")
    parser.add_argument("--torch", default="2.13.0", help="version of torch (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where the engine keeps its images meanwhile (a temporary folder)")
    options = parser.parse_args(arguments)
    programs = PROGRAMS + (PROGRAMS_TOGETHER if set(options.images) >= TOGETHER else ())
    if missing := [name for name in programs if shutil.which(name) is None]:
        parser.error(f"needs {', '.join(missing)} (docs/docker.md says where they are from)")
    if os.geteuid() != 0:
        parser.error("needs root: it starts a container engine of its own")
    folder = Path(tempfile.mkdtemp(prefix="docker-check-", dir=options.folder))
    try:
        with engine_of_our_own(folder) as engine:
            check(engine, folder, options.images, options.torch)
    except (CheckFailed, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def check(engine: Engine, folder: Path, names: Sequence[str], torch: str) -> None:
    """Build the bases and the images, and run what can be run; with `cpu` and `gateway` also Compose and pods."""
    import_debian(engine, folder)
    with index_of_torch(folder, torch) as index:
        with_torch = (f"--build-arg=TORCH={torch}", f"--build-arg=TORCH_INDEX={index}")
        for name in names:
            if IMAGES[name][1] != DEBIAN:
                build_base(engine, IMAGES[name][1], NVIDIA)
            build(engine, name, *(with_torch if name in ("cpu", "torch") else ()))
    tag = "specserve-check-{}".format
    if "cpu" in names:
        check_server(engine, tag("cpu"), "SERVING_DRAFT=/models/draft")
    if set(names) >= TOGETHER:
        check_gateway(engine, tag("cpu"), tag("gateway"))
        engine("tag", tag("cpu"), image_of("server"))
        engine("tag", tag("gateway"), image_of("gateway"))
        build_base(engine, image_of("prometheus"), PROMETHEUS)
        check_compose(engine, folder)
        check_pods(engine, folder, [image_of("server"), image_of("gateway")])
    if "torch" in names:
        check_server(engine, tag("torch"), "SERVING_DEVICE=cpu", "SERVING_DTYPE=float32", "SERVING_KV_MEMORY_MB=256")
    if "trtllm" in names:
        plan = ("-m", "build.trtllm", "plan", "/specs/specs/draft-model-2xh100.toml")
        volume = f"--volume={ROOT}/tests/data/trtllm:/specs:ro"
        entry = "--entrypoint=/opt/venv/bin/python"
        told = engine("run", "--rm", *CONFINED, "--network=none", volume, entry, tag("trtllm"), *plan)
        print(f"trtllm: {told.splitlines()[0]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
