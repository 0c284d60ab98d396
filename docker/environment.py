"""Makes an image's Python environment; stdlib and pip only, run by the base image's own Python while it is built.

`make FOLDER` makes it: our packages first, the container's behind them, our code found in place. So what the container
needs keeps its versions, and Triton's Python stub, which ignores PYTHONPATH, finds all three.
`locked GROUP ...` prints the lines of requirements.lock that the project, these extras, torch or Triton need, for
`pip install --require-hashes`.
`requirements [EXTRA ...]` prints what pyproject.toml asks for, less Triton and torch, which are the container's own or
have a layer to themselves (`--all`: not less them); with `--lacking` less what the container has in a version that will
do; with `--only NAME` that package's requirement alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import site
import sys
import tomllib
import venv
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

APP = Path(__file__).resolve().parent.parent
LEFT_OUT = ("nvidia-pytriton", "torch")


def make(folder: Path) -> None:
    """Make the environment; without pip, because the container's own installs into it."""
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / f"python{version}" / "site-packages"
    behind = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages() if Path(path).is_dir()]
    (packages / "container.pth").write_text("".join(behind), encoding="utf-8")
    (packages / "specserve.pth").write_text(f"{APP}\n", encoding="utf-8")


def locked(lock: str, groups: Collection[str]) -> list[str]:
    """Return the packages that these groups need, each with its hashes; raises ValueError for a group without one.

    lock: the text of requirements.lock, in whose lines the groups stand behind the hashes.
    """
    pairs = [line.split("  # ") for line in lock.splitlines() if not line.startswith("#")]
    known = {group for _, needed_by in pairs for group in needed_by.split()}
    if unknown := sorted({*groups} - known):
        raise ValueError(f"requirements.lock has no group {unknown[0]!r} (it has {', '.join(sorted(known))})")
    return [requirement for requirement, needed_by in pairs if not {*groups}.isdisjoint(needed_by.split())]


def requirements(project: dict[str, Any], extras: Sequence[str]) -> list[str]:
    """Return the requirements of pyproject.toml's [project] and of these extras, and of the extras that those name."""
    wanted, extras = list(project["dependencies"]), list(extras)
    for extra in extras:  # the list grows by the extras that are named
        for word in project["optional-dependencies"][extra]:
            if name_of(word) == project["name"]:
                extras += re.findall(r"[\w-]+", word.partition("[")[2])
            else:
                wanted.append(word)
    return wanted


def lacking(requirement: str) -> bool:
    """True when the container's own packages do not meet the requirement."""
    from pip._vendor.packaging.requirements import Requirement

    try:
        found = importlib.metadata.version(name_of(requirement))
    except importlib.metadata.PackageNotFoundError:
        return True
    return found not in Requirement(requirement).specifier


def name_of(requirement: str) -> str:
    """Return a requirement's package: `numpy` of `numpy>=1.26,<2`."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("make").add_argument("folder", type=Path)
    verbs.add_parser("locked").add_argument("groups", nargs="+")
    listed = verbs.add_parser("requirements")
    listed.add_argument("extras", nargs="*")
    listed.add_argument("--all", action="store_true", help="Triton and torch, too: the container has neither")
    listed.add_argument("--only", metavar="NAME", help="only this package")
    listed.add_argument("--lacking", action="store_true", help="only what the container does not have")
    options = parser.parse_args(arguments)
    if options.verb == "make":
        make(options.folder)
    elif options.verb == "locked":
        try:
            print("\n".join(locked((APP / "requirements.lock").read_text(encoding="utf-8"), options.groups)))
        except ValueError as error:
            parser.error(str(error))
    else:
        project = tomllib.loads((APP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        wanted = requirements(project, options.extras)
        if not options.all:
            wanted = [word for word in wanted if name_of(word) not in LEFT_OUT]
        if options.only:
            wanted = [word for word in wanted if name_of(word) == options.only]
        print("\n".join(word for word in wanted if not options.lacking or lacking(word)))


if __name__ == "__main__":
    main()
