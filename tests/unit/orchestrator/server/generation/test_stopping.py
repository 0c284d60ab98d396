"""How an output ends: every row of the table in docs/stopping.md is run, cut into steps in every way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer

from orchestrator.server.text import FinishReason, Output, StopRule

ROOT = Path(__file__).resolve().parents[5]
DEMO = Tokenizer.from_file(str(ROOT / "models/target/tokenizer.json"))
HEADER = "| id | situation | tokens counted | text | finish_reason |"
ROW = re.compile(r'\| `([\w-]+)` \| (.+) \| (\d+) \| `(".*")` \| (\w+) \|')
EOS, MAX_TOKENS = 0, 99


class Row(NamedTuple):
    """A line of the table: what comes back."""

    situation: str
    num_tokens: int
    text: str
    reason: str


class Case(NamedTuple):
    """What a row is about: tokens, rule, and what comes from outside after the last token."""

    ids: list[int]
    words: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset([EOS])
    outside: FinishReason | None = None
    prompt: str = ""

    @property
    def rule(self) -> StopRule:
        return StopRule(self.max_tokens, self.stop_ids, self.words, self.min_tokens)


def table() -> list[tuple[str, Row]]:
    """The rows as they stand; a line that is none fails here."""
    text = (ROOT / "docs/stopping.md").read_text(encoding="utf-8")
    lines = text.partition(HEADER)[2].strip().splitlines()[1:]
    matches = [(line, ROW.fullmatch(line)) for line in lines]
    assert all(match for _, match in matches), [line for line, match in matches if not match]
    return [(m[1], Row(m[2], int(m[3]), json.loads(m[4]), m[5])) for _, m in matches if m]


def said(text: str) -> list[int]:
    return list(DEMO.encode(text).ids)


WORDS = said("one two three four")
ONE, TWO, TH = WORDS[:3]
ALL = [*WORDS, EOS]
KANJI = said("漢")
TORN = KANJI[:2]
BRACES = [*said("{"), *said("}")]
STOPS = said("one stop stop stop four")
CANCELLED, DEADLINE = FinishReason.CANCELLED, FinishReason.DEADLINE
TWO_ENDS = frozenset([EOS, TWO])

CASES = {
    "eos": Case(ALL),
    "eos-first": Case([EOS, *ALL]),
    "eos-ignored": Case([ONE, EOS, *ALL[1:]], max_tokens=3, stop_ids=frozenset()),
    "grammar-end": Case([*BRACES, EOS]),
    "id": Case(ALL, stop_ids=frozenset([EOS, TH])),
    "id-held": Case(ALL, ("four!",)),
    "id-torn": Case([*TORN, EOS]),
    "id-is-word": Case(ALL, ("two",), stop_ids=TWO_ENDS),
    "id-in-word": Case(ALL, ("one two",), stop_ids=TWO_ENDS),
    "word": Case(ALL, ("two",)),
    "word-in-token": Case(ALL, ("w",)),
    "word-of-tokens": Case(ALL, ("three",)),
    "word-torn": Case([*said("a"), *KANJI, *WORDS], ("漢",)),
    "word-contains-word": Case(ALL, ("two three", "wo")),
    "words-together": Case(ALL, ("two", "e two")),
    "word-not-completed": Case(ALL, ("two x",)),
    "word-in-prompt": Case([*said("p it"), EOS], ("stop",), prompt="sto"),
    "max": Case(ALL, max_tokens=3),
    "max-id": Case(ALL, max_tokens=7),
    "max-word": Case(ALL, ("two",), max_tokens=2),
    "max-held": Case(ALL, ("four!",), max_tokens=6),
    "max-torn": Case(KANJI, max_tokens=2),
    "max-torn-is-word": Case([*said("a"), *KANJI], ("�",), max_tokens=3),
    "min-id": Case(ALL, min_tokens=1, stop_ids=TWO_ENDS),
    "min-id-early": Case(ALL, min_tokens=2, stop_ids=TWO_ENDS),
    "min-eos-early": Case([ONE, EOS, *ALL[1:]], min_tokens=2),
    "min-word": Case(ALL, ("two",), min_tokens=1),
    "min-word-early": Case(ALL, ("two",), min_tokens=2),
    "min-word-across": Case(ALL, ("two three",), min_tokens=2),
    "min-word-again": Case([*STOPS[:3], *STOPS[4:]], ("stop",), min_tokens=2),
    "min-word-overlaps": Case(STOPS[:4], ("stop stop",), min_tokens=2),
    "min-word-early-held": Case(ALL, ("two", "two!"), min_tokens=2),
    "min-word-early-grows": Case(ALL, ("two", "two th"), min_tokens=2),
    "min-word-torn": Case([*KANJI, EOS], ("漢",), min_tokens=2),
    "min-word-torn-early": Case([*KANJI, EOS], ("漢",), min_tokens=3),
    "min-is-max": Case(ALL, ("two",), max_tokens=2, min_tokens=2),
    "min-is-max-id": Case(ALL, max_tokens=2, min_tokens=2, stop_ids=TWO_ENDS),
    "min-over-max": Case(ALL, max_tokens=3, min_tokens=5),
    "cancelled-first": Case([], outside=CANCELLED),
    "cancelled": Case(WORDS[:2], outside=CANCELLED),
    "cancelled-held": Case(WORDS, ("four!",), outside=CANCELLED),
    "cancelled-torn": Case(TORN, outside=CANCELLED),
    "cancelled-late": Case(WORDS, ("two",), outside=CANCELLED),
    "deadline": Case(WORDS[:2], outside=DEADLINE),
    "deadline-held": Case(WORDS, ("four!",), outside=DEADLINE),
    "deadline-late": Case(WORDS, max_tokens=3, outside=DEADLINE),
}


def every_cut(ids: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to cut tokens into steps."""
    for cuts in product([False, True], repeat=max(len(ids) - 1, 0)):
        steps: list[list[int]] = [[]]
        for token, cut in zip(ids, [False, *cuts], strict=False):
            if cut:
                steps.append([])
            steps[-1].append(token)
        yield steps


def ended(case: Case, steps: Sequence[Sequence[int]]) -> tuple[list[int], str, str | None]:
    """Feed the steps as the loop does, then what comes from outside: ids, text and reason."""
    output, ids, text = Output(DEMO, said(case.prompt), case.rule), [], ""
    for step in steps:
        chunk = output.push(step)
        ids, text = ids + chunk.ids, text + chunk.text
        if output.finish:
            break
    if case.outside:
        text += output.close(case.outside)
    assert output.num_tokens == len(ids)
    return ids, text, output.finish and output.finish.value


def test_stopping_every_row_has_a_case_and_every_case_a_row() -> None:
    names = [name for name, _ in table()]
    assert len(names) == len(set(names))
    assert set(names) == set(CASES)


@pytest.mark.parametrize(("name", "row"), table(), ids=lambda value: value if isinstance(value, str) else "")
def test_stopping_row_is_what_happens_however_the_tokens_are_cut_into_steps(name: str, row: Row) -> None:
    case = CASES[name]
    for steps in every_cut(case.ids):
        expected = (case.ids[: row.num_tokens], row.text, row.reason)
        assert ended(case, steps) == expected, steps


@pytest.mark.parametrize(("name", "row"), table(), ids=lambda value: value if isinstance(value, str) else "")
def test_stopping_row_names_what_its_case_sets(name: str, row: Row) -> None:
    case = CASES[name]
    named = {(key, int(value)) for key, value in re.findall(r"(max_tokens|min_tokens) (\d+)", row.situation)}
    limits = {("max_tokens", case.max_tokens), ("min_tokens", case.min_tokens)}
    assert named == limits - {("max_tokens", MAX_TOKENS), ("min_tokens", 0)}
    assert set(re.findall(r'`"(.+?)"`', row.situation)) == set(case.words)


def test_stopping_the_model_says_what_the_page_says() -> None:
    """The tokens of the table's sentence, or its rows count others."""
    assert [DEMO.decode([token]) for token in WORDS] == ["one", " two", " th", "ree", " f", "our"]
    assert [DEMO.decode([token]) for token in STOPS[:4]] == ["one", " stop", " stop", " stop"]
    assert [DEMO.decode([token]) for token in (*said("p it"), *BRACES)] == ["p", " it", "{", "}"]
    assert len(KANJI) == 3
