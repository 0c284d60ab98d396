"""Aliases of the public model, for clients that expect another server's model name, as a small model repository."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.core.errors import ConfigError

#: The model that every alias stands for.
MODEL = "speculative"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_NAME_LINE = re.compile(r'^name: "(.*)"$', re.MULTILINE)


def names_of(aliases: str, taken: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated list; raises ConfigError for one that is not a name, or is taken."""
    names = [name.strip() for name in aliases.split(",") if name.strip()]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"aliases must be names of letters, digits, _ and -, got {name!r} (key aliases)")
        if name in taken or names.count(name) > 1:
            raise ConfigError(f"aliases must be new names, got {name!r}, which is taken (key aliases)")
    return names


def write_repository(folder: Path, repository: Path, names: Sequence[str]) -> None:
    """Write a model repository with the public model under these names; its code stays in `repository`."""
    for name in names:
        config = (repository / MODEL / "config.pbtxt").read_text(encoding="utf-8")
        (folder / name).mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_NAME_LINE.sub(f'name: "{name}"', config, count=1), "utf-8")
        (folder / name / "1").symlink_to((repository / MODEL / "1").resolve())
