"""Finds a Triton server: a container's /opt/tritonserver, else the one inside the `nvidia-pytriton` wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import ConfigError

STUB = "triton_python_backend_stub"
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Triton:
    """An installed Triton server."""

    binary: Path
    backends: Path  # the folder that has python/libtriton_python.so
    libraries: tuple[Path, ...]  # for LD_LIBRARY_PATH
    from_wheel: bool

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` with this Triton's libraries and this interpreter first.

        The stub runs isolated: it ignores PYTHONPATH, and takes its site-packages from the first `python3` on PATH.
        """
        scripts = Path(sys.executable).parent
        if not (scripts / "python3").exists():
            raise ConfigError(f"no python3 beside {sys.executable}: Triton's Python stub finds its packages through it")
        first = {"PATH": [scripts], "LD_LIBRARY_PATH": [*self.libraries, *_python_library()]}
        joined = {name: [*map(str, paths), environ.get(name, "")] for name, paths in first.items()}
        return {**environ, **{name: os.pathsep.join(filter(None, paths)) for name, paths in joined.items()}}

    def flags(self) -> frozenset[str]:
        """Return the flags that this server knows; an unknown flag would keep it from starting."""
        command, environ = [str(self.binary), "--help"], self.environment(os.environ)
        answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        known = frozenset(re.findall(r"^\s*(--[a-z0-9-]+)", answer.stdout + answer.stderr, re.MULTILINE))
        if "--model-repository" not in known:
            output = (answer.stderr or answer.stdout).strip() or f"exit status {answer.returncode}"
            raise ConfigError(f"{self.binary} does not run: {output.splitlines()[0]}")
        return known


def find_triton(environ: Mapping[str, str], work: Path) -> Triton:
    """Find the server.

    environ: TRITON_ROOT, if set, replaces /opt/tritonserver. work: a private folder, for links that the wheel's
    server needs. Raises ConfigError if there is no Triton with a stub for this Python.
    """
    root = Path(environ.get("TRITON_ROOT") or "/opt/tritonserver")
    if (root / "bin/tritonserver").is_file():
        return _in_container(root)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"no Triton server: neither {root}/bin/tritonserver nor the package nvidia-pytriton (run `make setup`)"
        )
    return _in_wheel(Path(spec.submodule_search_locations[0]), work)


def _in_container(root: Path) -> Triton:
    stub = root / "backends/python" / STUB
    built_for = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes()) if stub.is_file() else None
    if built_for and built_for[1].decode() != _VERSION:
        raise ConfigError(f"{stub} is built for Python {built_for[1].decode()}, this is {_VERSION} ({sys.executable})")
    return Triton(root / "bin/tritonserver", root / "backends", (root / "lib",), from_wheel=False)


def _in_wheel(package: Path, work: Path) -> Triton:
    """Link the wheel's Python backend, and its stub for this Python version, which is elsewhere, into one folder."""
    server = package / "tritonserver"
    stub = server / "python_backend_stubs" / _VERSION / STUB
    if not stub.is_file():
        versions = (path.parent.name for path in stub.parent.parent.glob(f"*/{STUB}"))
        has = ", ".join(sorted(versions, key=lambda version: [*map(int, version.split("."))]))
        raise ConfigError(f"nvidia-pytriton has no stub for Python {_VERSION}, only for {has} ({server})")
    folder = work / "backends/python"
    folder.mkdir(parents=True)
    for source in (*(server / "backends/python").glob("*triton*"), stub):
        (folder / source.name).symlink_to(source)
    return Triton(
        server / "bin/tritonserver", folder.parent, (package.parent / "nvidia_pytriton.libs",), from_wheel=True
    )


def _python_library() -> list[Path]:
    """Return the folder of this interpreter's libpython, if it has one: the stub is linked against it."""
    folder = sysconfig.get_config_var("LIBDIR")
    found = folder and any(Path(folder).glob(f"libpython{_VERSION}.so*"))
    # The system's own is found anyway; its folder, put first on the path, would hide the wheel's libraries.
    return [Path(folder)] if found and not str(folder).startswith("/usr/lib") else []
