"""Builds shared libraries from C++ sources with the compiler at hand and loads them through ctypes."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.errors import first_line

#: Without contraction a product and a sum are fused only where the code says so: all builds round alike.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
COMPILE_LIMIT_S = 300


class Unbuilt(Exception):
    """A library cannot be built or loaded here; the message says why."""


@dataclass(frozen=True)
class NativeLibrary:
    """A shared library and the files in `folder` that it is made of; it is built to `folder`/built.

    sources: what is compiled. headers: what the sources include.
    """

    name: str
    folder: Path
    sources: tuple[str, ...]
    headers: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """Where the library belongs; other sources, flags or processors have another name."""
        digest = hashlib.sha256(" ".join((*FLAGS, _processor())).encode())
        for name in (*self.headers, *self.sources):
            digest.update((self.folder / name).read_bytes())
        return self.folder / "built" / f"lib{self.name}-{digest.hexdigest()[:16]}.so"

    def build(self) -> Path:
        """Compile the library unless that has been done; raises Unbuilt with the compiler's first line."""
        try:
            if (file := self.file).exists():
                return file
            file.parent.mkdir(exist_ok=True)
            with _locked(file.with_suffix(".lock")):
                if not file.exists():
                    self._compile(file)
        except OSError as error:
            raise Unbuilt(f"the native library {self.name!r} cannot be built: {first_line(error)}") from None
        return file

    def _compile(self, file: Path) -> None:
        partial = file.with_suffix(f".{os.getpid()}.part")
        command = [*compiler(), *FLAGS, *(str(self.folder / name) for name in self.sources), "-o", str(partial)]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=True)
            partial.replace(file)
        except subprocess.CalledProcessError as error:
            raise Unbuilt(f"{command[0]} failed: {first_line(error.stderr)}") from None
        except subprocess.TimeoutExpired:
            raise Unbuilt(f"{command[0]} took longer than {COMPILE_LIMIT_S} s") from None
        finally:
            partial.unlink(missing_ok=True)

    def load(self) -> ctypes.CDLL:
        """Return the library; raises Unbuilt when it cannot be built or loaded."""
        try:
            return ctypes.CDLL(str(self.build()))
        except OSError as error:
            raise Unbuilt(f"the native library {self.name!r} cannot be loaded: {first_line(error)}") from None


def compiler() -> list[str]:
    """Return the command of a C++ compiler: CXX, g++, clang++, or the one of the package ziglang."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return [found]
    probe = subprocess.run([sys.executable, "-c", "import ziglang"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise Unbuilt("no C++ compiler: install g++, or the Python package ziglang")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock between processes: of several that start together, one compiles and the others wait for it."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _processor() -> str:
    """Return the processor and its instruction sets, for which -march=native compiles."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
