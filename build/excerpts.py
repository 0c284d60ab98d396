"""Finds excerpts of source files that make good prompts; it knows nothing of tokens or prompt files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from build.corpus import Document

Function = ast.FunctionDef | ast.AsyncFunctionDef
MIN_ROWS = 8
SHOWN_ROWS = 0.6


@dataclass(frozen=True)
class Excerpt:
    """A prompt's text, without trailing white space. source: where it ends, as file:line."""

    text: str
    source: str


@dataclass(frozen=True)
class Length:
    """How long a prompt may be, in tokens. count: returns the number of tokens in a text."""

    min_tokens: int
    max_tokens: int
    count: Callable[[str], int]

    def fits(self, text: str) -> bool:
        """Return whether the text is neither too short nor too long."""
        return self.min_tokens <= self.count(text) <= self.max_tokens


Finder = Callable[[Document, Length], Iterator[Excerpt]]


@dataclass(frozen=True)
class Source:
    """A parsed file. starts: the lines (from 0) at which its top-level statements begin."""

    document: Document
    lines: list[str]
    nodes: list[ast.AST]
    starts: list[int]


def completions(document: Document, length: Length) -> Iterator[Excerpt]:
    """Yield excerpts from the start of a top-level statement to the last line of a function's head."""
    source = parse(document)
    for node in functions(source):
        head_end = node.body[0].lineno - 2
        if node.lineno - 1 <= head_end and source.lines[head_end].rstrip().endswith(":"):
            yield from _longest_fitting(source, [s for s in source.starts if s < node.lineno - 1], head_end, length)


def long_contexts(document: Document, length: Length) -> Iterator[Excerpt]:
    """Yield long excerpts that end with the head of a function; no two overlap by more than half."""
    last = -1
    for excerpt in completions(document, length):
        end = int(excerpt.source.rsplit(":", 1)[1])
        if last < 0 or end - last > excerpt.text.count("\n") // 2:
            last = end
            yield excerpt


def repetitions(document: Document, length: Length) -> Iterator[Excerpt]:
    """Yield tables, literals and runs of similar statements, cut after 60 % of their rows."""
    source = parse(document)
    for rows in _row_lines(source):
        end = rows[int(len(rows) * SHOWN_ROWS)]
        # A long table is shown in part: repetition needs only the nearest rows.
        starts = sorted(start for start in {*source.starts, *rows} if start < end)
        yield from _longest_fitting(source, starts, end, length)


def docstrings(document: Document, length: Length) -> Iterator[Excerpt]:
    """Yield code that breaks off within a docstring's prose, at the end of a line."""
    source = parse(document)
    for node in source.nodes:
        first, last = _docstring_lines(node)
        for end in range(first + 2, last - 1):
            if _is_prose(source.lines[end], source.lines[end + 1]):
                yield from _longest_fitting(source, [s for s in source.starts if s <= first], end, length)
                break


def _longest_fitting(source: Source, starts: list[int], end: int, length: Length) -> Iterator[Excerpt]:
    """Yield the longest excerpt that fits, from one of `starts` to `end` (lines from 0), if there is one."""
    text = ""
    for start in reversed(starts):
        longer = "\n".join(source.lines[start : end + 1]).rstrip()
        if length.count(longer) > length.max_tokens:
            break
        text = longer
    if length.fits(text):
        yield Excerpt(text, f"{source.document.path}:{end + 1}")


def parse(document: Document) -> Source:
    """Parse a file; a file that is not Python 3 (a test's data) has no nodes."""
    lines = document.text.split("\n")
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return Source(document, lines, [], [])
    firsts = [[node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))] for node in tree.body]
    return Source(document, lines, list(ast.walk(tree)), [min(numbers) - 1 for numbers in firsts])


def functions(source: Source) -> Iterator[Function]:
    """Yield the functions of a file in the order of their lines."""
    found = [node for node in source.nodes if isinstance(node, Function)]
    yield from sorted(found, key=lambda node: node.lineno)


def _row_lines(source: Source) -> Iterator[list[int]]:
    """Yield the lines (from 0) of the rows of each literal or run of similar statements with at least `MIN_ROWS`."""
    for node in source.nodes:
        for rows in _candidate_rows(node):
            lines = sorted({(row.end_lineno or row.lineno) - 1 for row in rows})
            if len(lines) >= MIN_ROWS:
                yield lines


def _candidate_rows(node: ast.AST) -> Iterator[list[ast.expr] | list[ast.stmt]]:
    """Yield the elements of a literal, or the runs of neighbouring statements that call or assign the same thing."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        yield node.elts
    elif isinstance(node, ast.Dict):
        yield node.values
    elif isinstance(node, Function | ast.ClassDef | ast.Module):
        yield from _runs(node.body)


def _runs(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield maximal runs of statements of one kind."""
    run: list[ast.stmt] = []
    for statement in body:
        if run and _kind(statement) != _kind(run[-1]):
            yield run
            run = []
        run.append(statement)
    yield run


def _kind(statement: ast.stmt) -> str:
    """Return what a statement calls or assigns, e.g. `self.assertEqual`; other statements are all different."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func)
    if isinstance(statement, ast.Assign):
        return f"assign {type(statement.value).__name__}"
    if isinstance(statement, ast.Assert):
        return "assert"
    return f"line {statement.lineno}"


def _docstring_lines(node: ast.AST) -> tuple[int, int]:
    """Return the first and last line (from 0) of a node's docstring; (0, 0) without one."""
    body = getattr(node, "body", None)
    if not isinstance(node, Function | ast.ClassDef | ast.Module) or not body or ast.get_docstring(node) is None:
        return 0, 0
    return body[0].lineno - 1, (body[0].end_lineno or 1) - 1


def _is_prose(line: str, following: str) -> bool:
    """Return whether a line is running text that the next line continues."""
    words = line.split()
    return len(words) >= 5 and line.rstrip()[-1] not in ".:" and ">>>" not in line and bool(following.strip())
