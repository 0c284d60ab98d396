"""Finds the places where a source file can be cut into a prompt; it does not know tokens or prompt files."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from build.corpus import Document

Function = ast.FunctionDef | ast.AsyncFunctionDef
MIN_ROWS = 8
SHOWN_ROWS = 0.6


@dataclass(frozen=True)
class Cut:
    """A prompt's text, which ends without white space, and the place where it was cut (file:line)."""

    text: str
    source: str


@dataclass(frozen=True)
class Length:
    """How long a prompt may be, in tokens."""

    min_tokens: int
    max_tokens: int
    count: Callable[[str], int]

    def fits(self, text: str) -> bool:
        """True when the text is neither too short nor too long."""
        return self.min_tokens <= self.count(text) <= self.max_tokens

    def exceeded_by(self, text: str) -> bool:
        """True when the text is too long."""
        return self.count(text) > self.max_tokens


Finder = Callable[[Document, Length], Iterator[Cut]]


@dataclass(frozen=True)
class Source:
    """A parsed file: its lines, its nodes, and the lines (from 0) at which its top-level statements begin."""

    document: Document
    lines: list[str]
    nodes: list[ast.AST]
    starts: list[int]


def completions(document: Document, length: Length) -> Iterator[Cut]:
    """Code that ends with the head of a function."""
    return _ending_at_heads(document, length)


def long_contexts(document: Document, length: Length) -> Iterator[Cut]:
    """A long stretch of a file, ending with the head of a function; no two cuts overlap by more than half."""
    last = -1
    for end, cut in _numbered(_ending_at_heads(document, length)):
        if last < 0 or end - last > cut.text.count("\n") // 2:
            last = end
            yield cut


def repetitions(document: Document, length: Length) -> Iterator[Cut]:
    """A table, literal or run of like statements, cut after 60 % of its rows."""
    source = parse(document)
    for rows in _row_lines(source):
        end = rows[int(len(rows) * SHOWN_ROWS)]
        # A long table is shown in part: its nearest rows are all that repetition needs.
        starts = sorted(start for start in {*source.starts, *rows} if start < end)
        yield from _longest_fitting(source, starts, end, length)


def docstrings(document: Document, length: Length) -> Iterator[Cut]:
    """Code and a part of a docstring's prose, ending with a word at the end of a line."""
    source = parse(document)
    for node in source.nodes:
        first, last = _docstring_lines(node)
        for end in range(first + 2, last - 1):
            if _is_prose(source.lines[end], source.lines[end + 1]):
                yield from _longest_fitting(source, [s for s in source.starts if s <= first], end, length)
                break


def _ending_at_heads(document: Document, length: Length) -> Iterator[Cut]:
    """Every cut from the start of a top-level statement to the last line of a function's head."""
    source = parse(document)
    for node in functions(source):
        head_end = node.body[0].lineno - 2
        if node.lineno - 1 <= head_end and source.lines[head_end].rstrip().endswith(":"):
            yield from _longest_fitting(source, [s for s in source.starts if s < node.lineno - 1], head_end, length)


def _longest_fitting(source: Source, starts: list[int], end: int, length: Length) -> Iterator[Cut]:
    """The cut of lines start..end (from 0) with the earliest start that is not too long, unless it is too short."""
    text = ""
    for start in reversed(starts):
        longer = "\n".join(source.lines[start : end + 1]).rstrip()
        if length.exceeded_by(longer):
            break
        text = longer
    if length.fits(text):
        yield Cut(text, f"{source.document.path}:{end + 1}")


def parse(document: Document) -> Source:
    """The file's nodes in order; a file that is no Python 3 (a test's data) has none."""
    lines = document.text.split("\n")
    try:
        tree = ast.parse(document.text)
    except SyntaxError:
        return Source(document, lines, [], [])
    return Source(document, lines, list(ast.walk(tree)), [_first_line(node) for node in tree.body])


def _first_line(node: ast.stmt) -> int:
    """Line (from 0) at which a statement begins, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def functions(source: Source) -> Iterator[Function]:
    """The functions of a file in the order of their lines."""
    found = [node for node in source.nodes if isinstance(node, Function)]
    yield from sorted(found, key=lambda node: node.lineno)


def _numbered(cuts: Iterator[Cut]) -> Iterator[tuple[int, Cut]]:
    """Each cut with the line at which it ends."""
    for cut in cuts:
        yield int(cut.source.rsplit(":", 1)[1]), cut


def _row_lines(source: Source) -> Iterator[list[int]]:
    """For each literal or run of like statements: the lines (from 0) of its rows, at least `MIN_ROWS`."""
    for node in source.nodes:
        for rows in _candidate_rows(node):
            lines = sorted({(row.end_lineno or row.lineno) - 1 for row in rows})
            if len(lines) >= MIN_ROWS:
                yield lines


def _candidate_rows(node: ast.AST) -> Iterator[list[ast.expr] | list[ast.stmt]]:
    """The elements of a literal, or the runs of neighbouring statements that call or assign the same thing."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        yield node.elts
    elif isinstance(node, ast.Dict):
        yield node.values
    elif isinstance(node, Function | ast.ClassDef | ast.Module):
        yield from _runs(node.body)


def _runs(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Maximal runs of statements of one kind."""
    run: list[ast.stmt] = []
    for statement in body:
        if run and _kind(statement) != _kind(run[-1]):
            yield run
            run = []
        run.append(statement)
    yield run


def _kind(statement: ast.stmt) -> str:
    """What a statement calls or assigns, e.g. `self.assertEqual`; statements of other sorts are all different."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func)
    if isinstance(statement, ast.Assign):
        return f"assign {type(statement.value).__name__}"
    if isinstance(statement, ast.Assert):
        return "assert"
    return f"line {statement.lineno}"


def _docstring_lines(node: ast.AST) -> tuple[int, int]:
    """First and last line (from 0) of a node's docstring; (0, 0) without one."""
    body = getattr(node, "body", None)
    if not isinstance(node, Function | ast.ClassDef | ast.Module) or not body or ast.get_docstring(node) is None:
        return 0, 0
    return body[0].lineno - 1, (body[0].end_lineno or 1) - 1


def _is_prose(line: str, following: str) -> bool:
    """True for a line of running text whose next line goes on."""
    words = line.split()
    return len(words) >= 5 and line.rstrip()[-1] not in ".:" and ">>>" not in line and bool(following.strip())
