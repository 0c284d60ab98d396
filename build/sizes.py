"""Checks the model folders against their size ceilings: `python -m build.sizes`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from build.workspace import MODELS

MIB = 1024 * 1024
CEILINGS_MIB = {"target": 24, "draft": 2, "ngram": 1, "medusa": 9, "eagle": 2, "eagle3": 3.5, "redrafter": 5}
TOTAL_CEILING_MIB = 48


class FolderSize(NamedTuple):
    """One row of the table: a model folder, its size in bytes and its ceiling in MiB (0 if it has none)."""

    name: str
    num_bytes: int
    ceiling_mib: float

    @property
    def fits(self) -> bool:
        """True if the size does not exceed the ceiling."""
        return self.num_bytes <= self.ceiling_mib * MIB


def folder_sizes(models: Path) -> list[FolderSize]:
    """Return a row per model folder and, last, their sum; hidden folders are not published and do not count."""
    rows = []
    for folder in sorted(path for path in models.iterdir() if path.is_dir() and not path.name.startswith(".")):
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        rows.append(FolderSize(folder.name, num_bytes, CEILINGS_MIB.get(folder.name, 0)))
    return [*rows, FolderSize("all", sum(row.num_bytes for row in rows), TOTAL_CEILING_MIB)]


def main(models: Path = MODELS) -> None:
    """Print the table, with a remark on each row that does not fit; exit with status 1 if there is one."""
    rows = folder_sizes(models)
    print(f"{'model':<10} {'MiB':>7} {'ceiling':>8}")
    for row in rows:
        remark = "" if row.fits else ("  too large" if row.ceiling_mib else "  has no ceiling in build/sizes.py")
        print(f"{row.name:<10} {row.num_bytes / MIB:>7.2f} {row.ceiling_mib:>8.1f}{remark}")
    sys.exit(0 if all(row.fits for row in rows) else 1)


if __name__ == "__main__":
    main()
