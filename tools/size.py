"""`python -m tools.size [ROOT]` (make size): files, functions and lines of a checkout's production code, by folder.

Production code is every Python file outside tests/. A function's length includes its docstring, not its decorators.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHORT, LONG = 40, 300
#: Column titles, in the order of `row`.
TITLES = ("folder", "files", "lines", "code", "functions", "median", "p90", "longest", f"< {SHORT}", f"> {LONG}")
_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class File:
    """One source file: its number of lines, of lines with code, and the length of each of its functions."""

    path: Path
    num_lines: int
    num_code_lines: int
    functions: tuple[int, ...]

    @property
    def is_short(self) -> bool:
        """True for a file under SHORT lines, except `__init__.py`, which is expected to be short."""
        return self.num_lines < SHORT and self.path.name != "__init__.py"


def code_lines(source: str) -> int:
    """Return the number of lines with code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    at_start = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and at_start:
            continue
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
        at_start = token.type in _NOT_CODE
    return len(lines)


def function_lengths(source: str) -> list[int]:
    """Return the number of lines of every function and method, nested ones included."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def read_files(root: Path) -> list[File]:
    """Read the production files below `root`, in the order of their paths; hidden folders are left out."""
    paths = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    kept = [path for path in paths if path.parts[0] != "tests" and not any(part[0] == "." for part in path.parts)]
    sources = {path: (root / path).read_text(encoding="utf-8") for path in kept}
    return [File(p, s.count("\n"), code_lines(s), tuple(function_lengths(s))) for p, s in sources.items()]


def row(name: str, files: Sequence[File]) -> tuple[str | int, ...]:
    """Return one line of the table."""
    lengths = sorted(length for file in files for length in file.functions) or [0]
    numbers = (len(files), sum(file.num_lines for file in files), sum(file.num_code_lines for file in files))
    spread = (round(statistics.median(lengths)), lengths[len(lengths) * 9 // 10], lengths[-1])
    ends = (sum(file.is_short for file in files), sum(file.num_lines > LONG for file in files))
    return (name, *numbers, sum(len(file.functions) for file in files), *spread, *ends)


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit status."""
    folders: dict[str, list[File]] = defaultdict(list)
    files = read_files(Path(arguments[0]) if arguments else Path.cwd())
    for file in files:
        folders[f"{file.path.parts[0]}/"].append(file)
    for cells in (TITLES, *(row(name, some) for name, some in folders.items()), row("all", files)):
        print(f"{cells[0]:<18}" + "".join(f"{cell:>10}" for cell in cells[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
