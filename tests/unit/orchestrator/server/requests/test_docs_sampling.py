"""docs/sampling.md says what is so: every limit and every cell of option × method is asked of the RequestBuilder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import load_config
from orchestrator.core.errors import RequestError
from orchestrator.core.grammar import Grammars
from orchestrator.core.methods import DRAFTERS, PROPOSED
from orchestrator.server.generation_request import GenerationRequest
from orchestrator.server.inputs import INPUTS, read
from orchestrator.server.request_builder import RequestBuilder
from tests.support.input_kinds import UNSUPPORTED, kind_of

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[5]
TEXT = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
CELLS = re.compile(r"(?<!\\)\|")
CELL = re.compile(r'(?P<how>all|all but (?P<names>`\w+`(, `\w+`)*)|refused)(: "(?P<why>[^"]+)")?')
BASE: dict[str, Any] = {"text_input": "one two", "max_tokens": 8}
RANGE = re.compile(r"(-?[\d.]+?)\.\.([\d.]+)")


def rows(marker: str) -> list[list[str]]:
    """The cells of the table after a marker."""
    lines = TEXT.partition(f"<!-- {marker} -->\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace(r"\|", "|") for cell in CELLS.split(line)[1:-1]] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


class Cell(NamedTuple):
    """One option under one method; why: the words of the refusal, empty where it is taken."""

    example: dict[str, Any]
    method: str
    why: str


def cells() -> dict[str, Cell]:
    found = {}
    for number, (_, example, how) in enumerate(rows("options")):
        match = CELL.fullmatch(how)
        assert match and bool(match["why"]) == (match["how"] != "all"), how
        refusing = set(names(match["names"] or "")) if match["how"] != "refused" else set(PROPOSED)
        assert refusing <= set(PROPOSED), how
        inputs = json.loads(example.strip("`"))
        for method in [inputs["speculation"]] if "speculation" in inputs else PROPOSED:
            why = match["why"] if method in refusing else ""
            found[f"{number} {example[1:60]} {method}"] = Cell(inputs, method, why)
    return found


OPTIONS, LIMITS = cells(), {names(row[0])[0]: row[1] for row in rows("limits")}


@pytest.fixture(scope="module")
def builder() -> RequestBuilder:
    config = load_config(ROOT / "tests/data/serving.toml")
    checkpoint = read_checkpoint(config.target)
    grammars = Grammars(checkpoint.tokenizer_file, checkpoint.vocab_size, checkpoint.eos_ids)
    return RequestBuilder(config, checkpoint, frozenset(DRAFTERS), grammars)


def build(builder: RequestBuilder, inputs: dict[str, Any]) -> GenerationRequest:
    """Check a request as the server does."""
    given = read({}, json.dumps(inputs))
    builder.timeout_ms(given)
    return builder.build(given)


def asked(cell: Cell) -> dict[str, Any]:
    """Return the example under a method, which `predicted` needs a prediction for."""
    predicts = cell.method == "predicted" and not cell.example.keys() & {"draft_text", "draft_input_ids"}
    return {**BASE, "speculation": cell.method, **({"draft_text": "two"} if predicts else {}), **cell.example}


def test_every_supported_input_has_a_row_and_none_is_made_up() -> None:
    written = {name for cell, *_ in rows("options") for name in names(cell)}
    supported = INPUTS.keys() - UNSUPPORTED.keys()
    assert supported <= written
    assert written - supported <= set(PROPOSED)
    assert set(LIMITS) <= supported


def test_every_row_shows_the_inputs_that_it_is_about() -> None:
    for about, example, _ in rows("options"):
        shown = json.loads(example.strip("`")).keys() | {"speculation"}
        assert {name for name in names(about) if name in INPUTS} <= shown, about


@pytest.mark.parametrize("name", OPTIONS)
def test_option_is_taken_or_refused_as_the_table_says(builder: RequestBuilder, name: str) -> None:
    cell = OPTIONS[name]
    if not cell.why:
        assert build(builder, asked(cell)).plan.method
        return
    with pytest.raises(RequestError, match=re.escape(cell.why)):
        build(builder, asked(cell))


@pytest.mark.parametrize("name", [name for name, cell in LIMITS.items() if cell != "any"])
def test_limit_is_where_the_table_says(builder: RequestBuilder, name: str) -> None:
    match = RANGE.fullmatch(LIMITS[name])
    assert match
    number = float if kind_of(name) == "float" else int
    low, high = number(match[1]), number(match[2])
    for value in (low, high):
        build(builder, {**BASE, "speculation": "none", name: value})
    for value in (low - 1, high + 1):
        with pytest.raises(RequestError, match=rf"{name} must be (an? (integer|number) )?in \S+\.\."):
            build(builder, {**BASE, "speculation": "none", name: value})
