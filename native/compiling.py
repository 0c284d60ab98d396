"""Compiles a shared library from C++ sources, with the compiler that is installed, and loads it through ctypes."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from orchestrator.core.errors import ConfigError, first_line

#: Without contraction, a product and a sum are fused only where the code says so: all builds round alike.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-pthread")
COMPILE_LIMIT_S = 300

#: The environment variable that names the levels to build for, the best first, if the libraries will run on another
#: machine than the one that compiles them (an image); unset: this machine.
LEVELS_VARIABLE = "NATIVE_LEVELS"
_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
#: The levels of the x86-64 psABI, and those with more instructions (see _TARGETS) → the flags in /proc/cpuinfo that a
#: processor of the level has.
LEVELS = {
    "x86-64-v4-bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
    "x86-64-v4-vnni": _AVX512 | {"avx512_vnni"},
    "x86-64-v4": _AVX512,
    "x86-64-v3-vnni": _AVX2 | {"avx_vnni"},
    "x86-64-v3": _AVX2,
}
_TARGETS = {
    "x86-64-v4-bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    "x86-64-v4-vnni": ["-march=x86-64-v4", "-mavx512vnni"],
    "x86-64-v3-vnni": ["-march=x86-64-v3", "-mavxvnni"],
}


class Unbuilt(ConfigError):
    """The native library cannot be built or loaded here; the message says why."""


@dataclass(frozen=True)
class NativeLibrary:
    """A shared library that is compiled from files in `folder`, to `folder`/built.

    sources: the files that are compiled, each by itself and as many at a time as there are processors. headers: the
    files that they include.
    """

    name: str
    folder: Path
    sources: tuple[str, ...]
    headers: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """Path of the compiled library; its name depends on the sources, the flags and the processor."""
        digest = hashlib.sha256(" ".join((*FLAGS, _level() or _processor())).encode())
        for name in (*self.headers, *self.sources):
            digest.update((self.folder / name).read_bytes())
        return self.folder / "built" / f"lib{self.name}-{digest.hexdigest()[:16]}.so"

    def build(self) -> Path:
        """Compile the library unless its file exists; raises Unbuilt with the first line of the compiler's output."""
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
        command = [*compiler(), *FLAGS, *_target()]
        try:
            with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = [f"{folder}/{number}.o" for number in range(len(self.sources))]
                calls = [
                    pool.submit(_run, [*command, f"-I{self.folder}", "-c", str(self.folder / source), "-o", made])
                    for source, made in zip(self.sources, objects, strict=True)
                ]
                for call in calls:
                    call.result()
                _run([*command, "-shared", *objects, "-o", str(partial)])
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def load(self, loader: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
        """Build and load the library; raises Unbuilt when it cannot be built or loaded.

        loader: ctypes.PyDLL if its calls are so short that they should not release Python's global lock.
        """
        if (level := _level()) and not _runs(level):
            raise Unbuilt(f"this processor lacks {', '.join(sorted(LEVELS[level] - _instruction_sets()))} ({level})")
        try:
            return loader(str(self.build()))
        except OSError as error:
            raise Unbuilt(f"the native library {self.name!r} cannot be loaded: {first_line(error)}") from None


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise Unbuilt(f"{command[0]} failed: {first_line(error.stderr)}") from None
    except subprocess.TimeoutExpired:
        raise Unbuilt(f"{command[0]} took longer than {COMPILE_LIMIT_S} s") from None


def compiler() -> list[str]:
    """Return the command of a C++ compiler: CXX, g++, clang++, or the compiler in the package ziglang."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return [found]
    probe = subprocess.run([sys.executable, "-c", "import ziglang"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise Unbuilt("no C++ compiler: install g++, or the Python package ziglang")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock across processes: of several that start together, one compiles and the others wait."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _level() -> str | None:
    """Return the first named level that this processor supports, else the last named one; None if none is named."""
    named = os.environ.get(LEVELS_VARIABLE, "").replace(",", " ").split()
    if unknown := [level for level in named if level not in LEVELS]:
        raise Unbuilt(f"{LEVELS_VARIABLE} must name some of {', '.join(LEVELS)}, got {unknown[0]!r}")
    return next((level for level in named if _runs(level)), named[-1] if named else None)


def _target() -> list[str]:
    """Return the compiler's options for the level, or for this machine."""
    level = _level() or "native"
    return _TARGETS.get(level) or [f"-march={level}"]


def _runs(level: str) -> bool:
    return LEVELS[level] <= _instruction_sets()


def _instruction_sets() -> frozenset[str]:
    return frozenset(_processor().split())


def _processor() -> str:
    """Return the processor and its instruction sets, for which -march=native compiles."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return f"{platform.machine()} {next((line for line in lines if line.startswith(('flags', 'Features'))), '')}"
