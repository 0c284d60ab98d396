"""requirements.lock: exactly what pyproject.toml and constraints.txt ask for, each file by its hash, from no named host."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import PYTHONS, LockError, Package, closure, environment_of, groups_of, read_report

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
LOCK = (ROOT / "requirements.lock").read_text()
# By its file: a package `docker` may be installed.
environment = SimpleNamespace(**runpy.run_path(str(ROOT / "docker/environment.py")))
#: What torch 2.11 to 2.13 need; the torch that is installed here may be of another build.
TORCH = [
    "filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2",
    "fsspec>=0.8.5", 'nvidia-cublas==13.1.0.3; platform_system == "Linux"', 'triton==3.6.0', 'optree; extra == "optree"',
]  # fmt: skip
LINE = re.compile(
    r'(?P<name>[a-z0-9-]+)==(?P<version>[\w.!+]+)( ; python_version == "(?P<python>3\.\d+)")?'
    r"(?P<hashes>( --hash=sha256:[0-9a-f]{64})+)  # (?P<groups>[a-z-]+( [a-z-]+)*)"
)


class Locked(NamedTuple):
    version: str
    groups: tuple[str, ...]


def problems(lock: str, document: dict[str, Any], constraints: str) -> Iterator[str]:
    """Yield what is wrong with a lock."""
    found: dict[str, Locked] = {}
    for line in lock.splitlines():
        if line.startswith("#"):
            continue
        if not (match := LINE.fullmatch(line)):
            yield f"not a line of a lock: {line[:60]}"
            continue
        found[match["name"]] = Locked(match["version"], tuple(match["groups"].split()))
    yield from _host_problems(lock)
    yield from _pin_problems(found, constraints)
    yield from _need_problems(found, document)


def _host_problems(lock: str) -> Iterator[str]:
    if hosts := re.findall(r"\w+://|[\w-]+\.(?:org|com|net|io)\b", lock):
        yield f"names a host: {hosts[0]}"


def _pin_problems(found: dict[str, Locked], constraints: str) -> Iterator[str]:
    for line in constraints.splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            locked = found.get(canonicalize_name(name))
            if not locked or locked.version != version:
                yield f"constraints.txt has {line}, the lock {locked and locked.version}"


def _need_problems(found: dict[str, Locked], document: dict[str, Any]) -> Iterator[str]:
    """Compute anew who needs what, from the packages that are installed here."""
    groups = groups_of(document, TORCH)
    packages = {name: Package(locked.version, "0" * 64, _requires(name)) for name, locked in found.items()}
    try:
        members = {
            group: {name for python in PYTHONS for name in closure(wanted, packages, groups, environment_of(python))}
            for group, wanted in groups.items()
        }
    except LockError as error:
        yield str(error)
        return
    for group, wanted in groups.items():
        for requirement in wanted:
            name = canonicalize_name(requirement.name)
            if name in found and found[name].version not in requirement.specifier:
                yield f"{group} wants {requirement}, the lock has {found[name].version}"
    for name, locked in found.items():
        needed_by = tuple(group for group in groups if name in members[group])
        if needed_by != locked.groups:
            yield f"{name} is needed by {needed_by}, the lock says {locked.groups}"


def _requires(name: str) -> tuple[Requirement, ...]:
    """Return what an installed package needs; of those that are not here (the fuzzer, the compiler) that is nothing."""
    try:
        return tuple(map(Requirement, importlib.metadata.requires(name) or ()))
    except importlib.metadata.PackageNotFoundError:
        return ()


def test_the_lock_is_what_is_asked_for() -> None:
    assert list(problems(LOCK, DOCUMENT, CONSTRAINTS)) == []
    assert {"atheris", "py-spy", "ziglang", "torch"} & set(re.findall(r"^([\w-]+)==", LOCK, re.MULTILINE)) == {
        "atheris", "py-spy", "ziglang",
    }  # fmt: skip


def with_line(name: str, line: str) -> str:
    changed = re.sub(rf"^{name}==.*\n", line, LOCK, flags=re.MULTILINE)
    assert changed != LOCK
    return changed


FASTAPI = re.search(r"^fastapi==.*\n", LOCK, re.MULTILINE)[0]
BREAKS = {
    "a package is missing": (with_line("fastapi", ""), "fastapi"),
    "a package that another needs is missing": (with_line("annotated-types", ""), "annotated-types"),
    "a version is not that of constraints.txt": (with_line("fastapi", re.sub(r"==[\d.]+", "==0.1", FASTAPI)), "0.1"),
    "a hash is missing": (with_line("fastapi", re.sub(r" --hash=\S+", "", FASTAPI)), "not a line"),
    "a hash is short": (with_line("fastapi", re.sub(r"(sha256:\w{63})\w", r"\1", FASTAPI)), "not a line"),
    "a host is named": (f"--index-url https://packages.example.org/simple\n{LOCK}", "names a host"),
    "nobody needs it": (LOCK + f"zzz==1 --hash=sha256:{'0' * 64}  # dev\n", "zzz is needed by ()"),
    "a group lacks it": (with_line("starlette", re.search(r"^starlette==.*\n", LOCK, re.M)[0].replace("# ", "# otel ")), "starlette"),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKS)
def test_a_lock_that_is_wrong_is_found(what: str) -> None:
    lock, words = BREAKS[what]
    assert any(words in problem for problem in problems(lock, DOCUMENT, CONSTRAINTS))


# What images and make select.


def names(*groups: str) -> set[str]:
    return {line.partition("==")[0] for line in environment.locked(LOCK, groups)}


def test_a_group_is_selected_without_what_the_others_have_alone() -> None:
    gateway, server, triton = names("project", "gateway"), names("project", "serve"), names("triton")
    assert {"fastapi", "tritonclient", "numpy"} <= gateway and not gateway & {
        "transformers",
        "nvidia-pytriton",
        "sympy",
    }
    assert {"transformers", "numpy"} <= server and not server & {"fastapi", "nvidia-pytriton", "sympy", "pytest"}
    assert "nvidia-pytriton" in triton and names("torch") >= {"sympy", "networkx", "jinja2"}
    assert not any(re.match("nvidia-cu|cuda-|triton$", name) for name in names("torch"))
    assert all(" --hash=sha256:" in line and "#" not in line for line in environment.locked(LOCK, ["dev"]))


# How it is made.

REPORT = {
    "install": [
        {
            "metadata": {"name": "Some_Package", "version": "1.2", "requires_dist": ["other>=1"]},
            "download_info": {"url": "https://example.org/a.whl", "archive_info": {"hashes": {"sha256": "a" * 64}}},
        }
    ]
}


def test_a_report_of_pip_is_read_and_files_of_this_machine_are_refused() -> None:
    (name,) = packages = read_report(REPORT)
    assert name == "some-package" and packages[name] == Package("1.2", "a" * 64, (Requirement("other>=1"),))
    item = {**REPORT["install"][0], "download_info": {"url": "file:///wheels/a.whl"}}
    with pytest.raises(LockError, match="from a folder of this machine"):
        read_report({"install": [item]})


def package(version: str, letter: str, *requires: str) -> Package:
    return Package(version, letter * 64, tuple(map(Requirement, requires)))
