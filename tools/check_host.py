"""Prints, one line each, what this machine lacks for `make setup`; runs on any Python 3, before anything else."""

import ctypes
import os
import platform
import shutil
import sys

_GLIBC = (2, 35)  # the oldest that Triton's wheel supports
_FREE_GIB = 4  # torch (CPU), Triton and their dependencies


def problems(folder: str) -> "list[str]":
    """Return one sentence for each thing that is missing, in the order in which to fix it."""
    checks = (_platform(), _python(), _venv(), _libpython(), _disk(folder))
    return [problem for problem in checks if problem]


def _platform() -> str:
    here = f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        return f"Triton's wheel is for Linux x86_64, this is {here}: use the container instead"
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < _GLIBC:
        needed = ".".join(map(str, _GLIBC))
        here = f"{name or 'another libc'} {version}"
        return f"Triton's wheel needs glibc >= {needed} (Debian 12, Ubuntu 22.04), this is {here}"
    return ""


def _python() -> str:
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return ""
    here = f"{platform.python_version()} ({sys.executable})"
    return f"Python 3.11 or 3.12 is needed, this is {here}: make setup PYTHON=python3.12"


def _venv() -> str:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return f"Python's venv module is missing: apt install python3.{sys.version_info[1]}-venv"
    return ""


def _libpython() -> str:
    """Look for the shared libpython: Triton's Python stub is linked against it, but an interpreter need not have it."""
    import sysconfig

    name = f"libpython3.{sys.version_info[1]}.so.1.0"
    beside = os.path.join(sysconfig.get_config_var("LIBDIR") or "", name)
    try:
        ctypes.CDLL(beside if os.path.exists(beside) else name)
    except OSError:
        return f"Triton's Python stub needs {name}: apt install libpython3.{sys.version_info[1]}"
    return ""


def _disk(folder: str) -> str:
    free = shutil.disk_usage(folder).free / 2**30
    return "" if free >= _FREE_GIB else f"{_FREE_GIB} GiB of free disk are needed, {free:.1f} are left in {folder}"


if __name__ == "__main__":
    found = problems(os.getcwd())
    for line in found:
        sys.stderr.write(f"setup: {line}\n")
    sys.exit(2 if found else 0)
