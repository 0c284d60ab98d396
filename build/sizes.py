"""Checks the model folders against their size limits: `python -m build.sizes`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from build.workspace import MODELS

MIB = 1024 * 1024
CEILINGS_MIB = {
    "target": 24.0,
    "draft": 2.0,
    "ngram": 1.0,
    "medusa": 9.0,
    "eagle": 2.0,
    "eagle3": 3.5,
    "redrafter": 5.0,
}
TOTAL_CEILING_MIB = 48.0


@dataclass(frozen=True)
class FolderSize:
    """One row of the table: a model folder, its size in bytes and its limit in MiB (0 if it has none)."""

    name: str
    num_bytes: int
    ceiling_mib: float

    @property
    def fits(self) -> bool:
        """True if the size does not exceed the limit."""
        return self.num_bytes <= self.ceiling_mib * MIB


def folder_sizes(models: Path) -> list[FolderSize]:
    """Return a row per model folder and, last, their sum; hidden folders are not published and do not count."""
    folders = sorted(path for path in models.iterdir() if path.is_dir() and not path.name.startswith("."))
    rows = [
        FolderSize(
            folder.name,
            sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            CEILINGS_MIB.get(folder.name, 0.0),
        )
        for folder in folders
    ]
    return [*rows, FolderSize("all", sum(row.num_bytes for row in rows), TOTAL_CEILING_MIB)]


def table(rows: list[FolderSize]) -> str:
    """Return the rows as text, with a remark on each that does not fit."""
    lines = [f"{'model':<10} {'MiB':>7} {'ceiling':>8}"]
    for row in rows:
        remark = "" if row.fits else ("  too large" if row.ceiling_mib else "  has no ceiling in build/sizes.py")
        lines.append(f"{row.name:<10} {row.num_bytes / MIB:>7.2f} {row.ceiling_mib:>8.1f}{remark}")
    return "\n".join(lines)


def main(models: Path = MODELS) -> None:
    """Run the command; its exit status is 1 if a limit is exceeded."""
    rows = folder_sizes(models)
    print(table(rows))
    sys.exit(0 if all(row.fits for row in rows) else 1)


if __name__ == "__main__":
    main()
