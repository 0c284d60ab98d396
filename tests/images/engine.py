"""A container engine for `make docker-check` alone: its daemon, its base images, its command."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.images.checks import CheckFailed, succeeds, wait_for

ROOT = Path(__file__).resolve().parents[2]
DEBIAN, SUITE = "debian:12.12-slim", "bookworm"
#: What our images need of NVIDIA's: Python, pip, and Triton where NVIDIA has it.
NVIDIA = """\
FROM {debian}
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-pip python3-venv libpython3.11 \\
 && python3 -m pip install --no-cache-dir --no-deps --target /wheel nvidia-pytriton==0.7.0 \\
 && mkdir -p /opt/tritonserver/backends && cd /wheel/pytriton/tritonserver \\
 && cp -r bin /opt/tritonserver/ && cp -r backends/python /opt/tritonserver/backends/ \\
 && cp python_backend_stubs/3.11/triton_python_backend_stub /opt/tritonserver/backends/python/ \\
 && cp -r /wheel/nvidia_pytriton.libs /opt/tritonserver/lib && rm -rf /wheel
"""
#: What compose.yaml needs of Prometheus' official image: its user, folder and program.
PROMETHEUS = """\
FROM {debian}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus \\
 && mkdir --parents /prometheus && chown nobody:nogroup /prometheus
USER nobody
VOLUME /prometheus
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
"""


class Engine:
    """Docker, through its command line."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ

    def __call__(self, *words: str, limit_s: float = 1800.0, **options: Any) -> str:
        """Run a docker command and return what it printed; raises CheckFailed with its last lines."""
        return self.run("docker", *words, limit_s=limit_s, **options)

    def run(self, *words: str, limit_s: float = 1800.0, **options: Any) -> str:
        """Run a program that talks to the engine, as `docker` does."""
        try:
            done = subprocess.run(
                words,
                env=self._environ,
                cwd=ROOT,
                capture_output=True,
                timeout=limit_s,
                check=False,
                **options,
            )
        except subprocess.TimeoutExpired as error:
            raise CheckFailed(f"{' '.join(words[:7])}: no end within {limit_s:g} s") from error
        if done.returncode:
            told = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-8:]
            raise CheckFailed(f"{' '.join(words[:7])}: {' | '.join(told)}")
        return str(done.stdout.decode(errors="replace")).strip()


@contextlib.contextmanager
def engine_of_our_own(folder: Path) -> Iterator[Engine]:
    """Run a daemon without networks of its own: containers use the host's. At the end, remove all that it has."""
    socket = f"unix://{folder}/socket"
    state = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid", f"--host={socket}"]
    environ = {**os.environ, "DOCKER_HOST": socket, "DOCKER_BUILDKIT": "0"}
    with (folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", "--iptables=false", "--bridge=none", *state], stdout=log, stderr=log, start_new_session=True
        )
    engine = Engine(environ)
    try:
        wait_for(lambda: succeeds(lambda: engine("version", limit_s=10)), "the container engine", 30)
        yield engine
    finally:
        with contextlib.suppress(CheckFailed):
            if containers := engine("ps", "--all", "--quiet").split():
                engine("rm", "--force", *containers)
        daemon.terminate()
        daemon.wait(60)
        unmount_below(folder)


def unmount_below(folder: Path) -> None:
    """Unmount what the engine leaves mounted: the host's network namespace."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{folder}/")]):
        subprocess.run(["umount", mount], check=False)


def import_debian(engine: Engine, folder: Path) -> None:
    """Import a minimal Debian under the base image's name, with this machine's certificates and pip settings."""
    root = folder / "debian"
    subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, root], stdout=sys.stderr, check=True
    )
    for file in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"):
        if Path(file).exists():
            shutil.copy(file, root / file[1:])
    for path in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/lib/apt/lists/*_*")):
        path.unlink()
    archive = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
    engine("import", "--change", 'CMD ["bash"]', "-", DEBIAN, stdin=archive.stdout)
    archive.wait()
    shutil.rmtree(root)


def build_base(engine: Engine, name: str, dockerfile: str) -> None:
    """Build an image from our Debian under the name of the image that it replaces."""
    engine("build", "--network=host", "--tag", name, "-", input=dockerfile.format(debian=DEBIAN).encode())


@contextlib.contextmanager
def index_of_torch(folder: Path, version: str) -> Iterator[str]:
    """Serve a package index with the torch that pip finds from this machine; yield its address."""
    wheels = folder / "index" / "torch"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--python-version", "3.11", "--dest", wheels, f"torch=={version}"], check=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=wheels.parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
