"""Makes the edit prompts: a function, then the beginning of its copy with one name changed."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from build.corpus import Document
from build.excerpts import Excerpt, Function, Length, functions, parse

# The new name is the first of these that does not occur in the function's text.
NEW_NAMES = ("total", "entry", "current", "payload")
MIN_USES = 4


def edits(document: Document, length: Length) -> Iterator[Excerpt]:
    """Yield functions, each followed by the announcement of a renamed copy and the copy's first lines."""
    source = parse(document)
    for node in functions(source):
        text = textwrap.dedent("\n".join(source.lines[node.lineno - 1 : node.end_lineno]))
        edit = _renaming(text)
        if edit is not None and length.fits(edit):
            yield Excerpt(edit, f"{document.path}:{node.end_lineno}")


def _renaming(text: str) -> str | None:
    """Return the edit prompt for a function's text; None if it cannot be edited safely or uses no local name often."""
    function = _parsed_function(text)
    if function is None:
        return None
    uses = _local_uses(function)
    # Names inside f-strings have wrong columns before Python 3.12.
    lines = text.split("\n")
    if any(not lines[use.line].startswith(use.name, use.column) for use in uses):
        return None
    names = [name for name, count in Counter(use.name for use in uses).most_common() if count >= MIN_USES]
    if not names or not text.isascii():
        return None
    new = next((name for name in NEW_NAMES if name not in text), None)
    if new is None:
        return None
    changed = _replaced(text, [use for use in uses if use.name == names[0]], new).split("\n")
    first_change = next(number for number, line in enumerate(changed) if new in line)
    head = "\n".join(changed[: max(1, min(first_change + 1, len(changed) // 3))])
    return f"{text}\n\n\n# the same with `{names[0]}` renamed to `{new}`\n{head}".rstrip()


@dataclass(frozen=True)
class Use:
    """One use of a name. line, column: where it begins, from 0."""

    name: str
    line: int
    column: int


def _local_uses(function: Function) -> list[Use]:
    """Return all uses of the function's own arguments and assigned names, except `self` and `cls`."""
    arguments = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    used = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    bound = {node.arg for node in arguments} | {node.id for node in used if isinstance(node.ctx, ast.Store)}
    uses = [Use(node.arg, node.lineno - 1, node.col_offset) for node in arguments]
    uses += [Use(node.id, node.lineno - 1, node.col_offset) for node in used]
    return [use for use in uses if use.name in bound - {"self", "cls", "_"}]


def _replaced(text: str, uses: list[Use], new: str) -> str:
    """Return the text with `new` at all uses, replaced from the right so that columns stay valid."""
    lines = text.split("\n")
    for use in sorted(uses, key=lambda use: (use.line, use.column), reverse=True):
        line = lines[use.line]
        lines[use.line] = line[: use.column] + new + line[use.column + len(use.name) :]
    return "\n".join(lines)


def _parsed_function(text: str) -> Function | None:
    """Parse a function; None if its text could not be dedented, because a string in it has lines at the margin."""
    try:
        function = ast.parse(text).body[0]
    except SyntaxError:
        return None
    return function if isinstance(function, Function) else None
