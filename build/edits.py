"""Makes the edit prompts: a function and the beginning of its copy with one name changed; it does not know tokens."""

import ast
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from build.corpus import Document
from build.cuts import Cut, Function, Length, functions, parse

# The first of these that the function's text does not contain is the new name.
NEW_NAMES = ("total", "entry", "current", "payload")
MIN_USES = 4


def edits(document: Document, length: Length) -> Iterator[Cut]:
    """A function, the announcement of a renamed copy, and the copy's first line."""
    source = parse(document)
    for node in functions(source):
        text = textwrap.dedent("\n".join(source.lines[node.lineno - 1 : node.end_lineno]))
        edit = _renaming(text)
        if edit is not None and length.fits(edit):
            yield Cut(edit, f"{document.path}:{node.end_lineno}")


def _renaming(text: str) -> str | None:
    """The edit prompt for a function's text, or None when it has no local name used often enough."""
    function = _parsed_function(text)
    if function is None:
        return None
    places = _local_uses(function)
    # Names inside f-strings have no true columns before Python 3.12.
    lines = text.split("\n")
    if any(not lines[place.line].startswith(place.name, place.column) for place in places):
        return None
    names = [name for name, count in Counter(place.name for place in places).most_common() if count >= MIN_USES]
    if not names or not text.isascii():
        return None
    new = next((name for name in NEW_NAMES if name not in text), None)
    if new is None:
        return None
    changed = _replaced(text, [place for place in places if place.name == names[0]], new).split("\n")
    head = "\n".join(changed[: _shown_lines(changed, new)])
    return f"{text}\n\n\n# the same with `{names[0]}` renamed to `{new}`\n{head}".rstrip()


def _shown_lines(changed: list[str], new: str) -> int:
    """Lines of the copy that the prompt shows: up to the first change, at most a third of them."""
    first_change = next(number for number, line in enumerate(changed) if new in line)
    return max(1, min(first_change + 1, len(changed) // 3))


@dataclass(frozen=True)
class Place:
    """One use of a name: line (from 0) and column."""

    name: str
    line: int
    column: int


def _local_uses(function: Function) -> list[Place]:
    """All uses of names that the function binds itself (arguments and assigned names), except `self` and `cls`."""
    arguments = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    used = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    bound = {node.arg for node in arguments} | {node.id for node in used if isinstance(node.ctx, ast.Store)}
    places = [Place(node.arg, node.lineno - 1, node.col_offset) for node in arguments]
    places += [Place(node.id, node.lineno - 1, node.col_offset) for node in used]
    return [place for place in places if place.name in bound - {"self", "cls", "_"}]


def _replaced(text: str, places: list[Place], new: str) -> str:
    """The text with `new` at all places, replaced from the right so that columns stay true."""
    lines = text.split("\n")
    for place in sorted(places, key=lambda place: (place.line, place.column), reverse=True):
        line = lines[place.line]
        lines[place.line] = line[: place.column] + new + line[place.column + len(place.name) :]
    return "\n".join(lines)


def _parsed_function(text: str) -> Function | None:
    """The function that `text` is, or None where a string's lines at the margin kept it from being dedented."""
    try:
        function = ast.parse(text).body[0]
    except SyntaxError:
        return None
    return function if isinstance(function, Function) else None
