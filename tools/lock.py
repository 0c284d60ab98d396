"""`python -m tools.lock`: writes requirements.lock, the packages that `make` and the images install, with their hashes.

pip resolves what pyproject.toml asks for, once for each Python, and says which files it would install. Versions come
from constraints.txt and, for the packages that those need, from the environment that this runs in, so that the lock has
the versions that were tested. torch is not locked, because each machine has a build of its own; what torch needs is,
apart from CUDA.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12")
#: The newest glibc that a locked file may ask for (Ubuntu 22.04); pip takes such a file on newer systems, too.
GLIBC = 35
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)), "manylinux2014_x86_64"]
#: Compiled where they are installed, so there is no file to lock.
UNLOCKED_EXTRAS = ("peers",)
#: Packages with a group of their own, because an image may have them already.
OWN_GROUPS = {"torch": "torch", "nvidia-pytriton": "triton"}
_CUDA = re.compile(r"nvidia-|cuda-|triton$")
_HEAD = """\
# Made by `python -m tools.lock`: every package for x86-64 Linux and Python {pythons}, with the hashes of its files.
# Behind the hashes: who needs it, as `docker/environment.py locked` selects. torch is not here (docs/security.md).
"""


class Package(NamedTuple):
    """A file that pip would install. requires: what its package asks for, with markers."""

    version: str
    sha256: str
    requires: tuple[Requirement, ...]


Packages = Mapping[str, Package]


class LockError(Exception):
    """The lock cannot be made."""


def groups_of(document: Mapping[str, Any], torch_requires: Iterable[str]) -> dict[str, list[Requirement]]:
    """Return the requirements of each group: the project, its extras, its build, torch and Triton.

    document: pyproject.toml. torch_requires: the requirements of the installed torch.
    """
    project, found = document["project"], dict[str, list[Requirement]]()
    lines = {"project": project["dependencies"], "build": document["build-system"]["requires"]}
    lines |= {name: words for name, words in project["optional-dependencies"].items() if name not in UNLOCKED_EXTRAS}
    for group, words in lines.items():
        for requirement in map(Requirement, words):
            found.setdefault(OWN_GROUPS.get(requirement.name, group), []).append(requirement)
    needs = map(Requirement, torch_requires)
    found["torch"] = [each for each in needs if not _CUDA.match(each.name) and "extra" not in str(each.marker)]
    return found


def closure(
    wanted: Iterable[Requirement],
    packages: Packages,
    extras: Mapping[str, list[Requirement]],
    environment: Mapping[str, str],
) -> set[str]:
    """Return the names of all packages that these requirements need; raises LockError for one that pip did not find.

    extras: the requirements of the project's own extras, which others may name as `specserve[...]`.
    """
    pending = [(requirement, "") for requirement in wanted]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "specserve":
            pending += [(each, "") for own in requirement.extras for each in extras[own]]
            continue
        if name not in packages:
            raise LockError(f"{requirement} is needed, but pip would not install it")
        for wanted_extra in {"", *requirement.extras} - {own for of, own in seen if of == name}:
            seen.add((name, wanted_extra))
            pending += [(each, wanted_extra) for each in packages[name].requires]
    return {name for name, _ in seen}


def environment_of(python: str) -> dict[str, Any]:
    """Return the environment in which markers are evaluated: this machine's (x86-64 Linux), with another Python."""
    return {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}


def read_report(report: Mapping[str, Any]) -> dict[str, Package]:
    """Return the packages of pip's installation report; raises LockError for a file that only this machine has."""
    packages: dict[str, Package] = {}
    for item in report["install"]:
        metadata, download = item["metadata"], item["download_info"]
        name = canonicalize_name(metadata["name"])
        if download["url"].startswith("file:"):
            raise LockError(
                f"pip would take {name} from a folder of this machine; lock with an index alone (PIP_FIND_LINKS= "
                "PIP_CONFIG_FILE=/dev/null)"
            )
        sha256, requires = download["archive_info"]["hashes"]["sha256"], metadata.get("requires_dist") or ()
        packages[name] = Package(metadata["version"], sha256, tuple(map(Requirement, requires)))
    return packages


def lock_text(packages: Mapping[str, Packages], groups: Mapping[str, list[Requirement]]) -> str:
    """Return the lock. packages: by Python, what pip would install. groups: the requirements that ask for it."""
    members = {
        python: {
            group: closure(wanted, found, groups, environment_of(python))
            for group, wanted in groups.items()
        }
        for python, found in packages.items()
    }  # fmt: skip
    lines = []
    for name in sorted({name for found in packages.values() for name in found}):
        versions: dict[str, list[str]] = {}
        for python, found in packages.items():
            if name in found:
                versions.setdefault(found[name].version, []).append(python)
        for version, pythons in versions.items():
            hashes = sorted({packages[python][name].sha256 for python in pythons})
            needed_by = [group for group in groups if any(name in members[python][group] for python in pythons)]
            if not needed_by:
                raise LockError(f"pip would install {name}, which nobody needs")
            marker = "" if len(pythons) == len(packages) else f' ; python_version == "{pythons[0]}"'
            words = [f"{name}=={version}{marker}", *(f"--hash=sha256:{each}" for each in hashes)]
            lines.append(f"{' '.join(words)}  # {' '.join(needed_by)}\n")
    return _HEAD.format(pythons=" and ".join(packages)) + "".join(lines)


def installed_pins(names: Iterable[str]) -> list[str]:
    """Return `name==version` for each package that is installed here, except those in `names`."""
    left_out = set(names)
    found = {canonicalize_name(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in left_out]


def resolve(python: str, wanted: Iterable[Requirement], pins: Iterable[str]) -> dict[str, Package]:
    """Return what pip would install for a Python; raises LockError with pip's message."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("wanted.txt", "pins.txt", "report.json")}
        files["wanted.txt"].write_text("".join(f"{each}\n" for each in wanted))
        files["pins.txt"].write_text("".join(f"{pin}\n" for pin in pins))
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
            *("--report", str(files["report.json"]), "--target", folder, "--only-binary", ":all:"),
            *("--python-version", python, *(word for each in PLATFORMS for word in ("--platform", each))),
            *("--constraint", str(files["pins.txt"]), "--requirement", str(files["wanted.txt"])),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LockError(f"pip for Python {python}: {done.stderr.strip()}")
        return read_report(json.loads(files["report.json"].read_text()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the lock; return the exit status."""
    parser = argparse.ArgumentParser(prog="tools.lock", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=LOCK, help=f"where to write it (default: {LOCK.name})")
    options = parser.parse_args(arguments)
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = groups_of(document, importlib.metadata.requires("torch") or ())
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = [line for line in lines if line and not line.startswith("#")]
    own = {canonicalize_name(Requirement(line).name) for line in constraints} | {"specserve", "torch", "pip"}
    pins = [*constraints, *installed_pins(own)]
    wanted = [each for requirements in groups.values() for each in requirements if each.name != "specserve"]
    try:
        options.out.write_text(lock_text({each: resolve(each, wanted, pins) for each in PYTHONS}, groups))
    except LockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
