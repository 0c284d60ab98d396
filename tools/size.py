"""`python -m tools.size`: lines of code per file and folder; the fewer, the better."""

from __future__ import annotations

import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

_FOLDERS = ("model_repository", "orchestrator", "runtime", "launcher", "build", "clients", "tools", "gateway", "tests")
_LIMIT = 250
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Return the lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    at_start = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and at_start:
            continue
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
        at_start = token.type in _SKIPPED
    return len(lines)


def main() -> int:
    """Print the table; return the exit status."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    print(f"{'lines':>7} {'code':>6}")
    for path in sorted(p for folder in _FOLDERS for p in Path(folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines, code = source.count("\n"), code_lines(source)
        print(f"{lines:7} {code:6}  {path}{f'   > {_LIMIT}' if lines > _LIMIT else ''}")
        totals[path.parts[0]] = [a + b for a, b in zip(totals[path.parts[0]], (lines, code, 1), strict=True)]
    for folder, (lines, code, files) in totals.items():
        print(f"{lines:7} {code:6}  {folder}/ ({files} files)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
