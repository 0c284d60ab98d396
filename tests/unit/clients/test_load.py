"""The report of `make load`: figures from known records, and where speculation stops paying."""

from __future__ import annotations

import re
from typing import Any

import pytest

from clients.load import parse
from clients.load_report import Cell, cell_of, stops_paying, to_html, to_markdown


def record(began_s: float, times: list[float], num_tokens: int, num_steps: int, error: str = "") -> dict[str, Any]:
    return {"began_s": began_s, "times": times, "num_tokens": num_tokens, "num_steps": num_steps, "error": error}


def cell(method: str, users: int, tokens_per_s: float, num_errors: int = 0) -> Cell:
    pair = (1.0, 2.0)
    return Cell(method, users, 10.0, 5, num_errors, 0, tokens_per_s, 2.0, 2.0, pair, pair, pair, pair)


def test_tokens_count_within_the_window_and_streams_that_began_in_it() -> None:
    records = [
        record(100.0, [1.0, 2.0, 3.0, 4.0], 8, 4),  # began before the window 102..110; 3 of its 4 chunks are in it
        record(103.0, [0.5, 1.0], 4, 2),
        record(104.0, [0.5, 1.5], 4, 2),
        record(109.0, [0.5, 2.0], 4, 2),  # its last chunk comes too late
        record(105.0, [], 0, 0, "no room"),
        record(105.0, [0.1], 4, 2, "prompt a with suffix: another text than before"),
    ]
    found = cell_of(records, "suffix", 4, 2.0, 10.0)
    assert found.tokens_per_s == (6 + 4 + 4 + 2) / 8
    assert (found.num_streams, found.num_errors, found.num_different) == (3, 2, 1)
    assert found.acceptance_length == 12 / 6 and found.tokens_per_chunk == 12 / 6
    assert found.first_token_ms == (500, 500)
    assert found.inter_token_ms[0] == pytest.approx(1000 / 3)
    assert found.inter_chunk_ms == (1000, 1500)


@pytest.mark.parametrize(
    ("by_users", "expected"),
    [
        ({1: 2.0, 4: 1.2, 16: 0.9, 64: 0.8}, "between 4 and 16"),
        ({1: 2.0, 4: 1.2}, "pays at 4 still"),
        ({1: 0.9, 4: 1.2}, "does not pay at 1"),
    ],
)
def test_where_speculation_stops_paying(by_users: dict[int, float], expected: str) -> None:
    assert stops_paying(by_users) == expected


def test_markdown_has_a_row_for_each_method_and_shows_errors() -> None:
    table = to_markdown([cell("none", 1, 50), cell("suffix", 1, 150, num_errors=2), cell("suffix", 4, 80)])
    assert "| `none` | 2.00 | 50 | – | – |" in table
    assert "| `suffix` | 2.00 | 150 (3.00 ×), 2 errors | 80 | pays at 1 still |" in table


def test_page_is_one_file_without_outside_resources() -> None:
    page = to_html([cell("none", 1, 50), cell("none", 4, 90), cell("<i>", 1, 150), cell("<i>", 4, 80)])
    assert page.count("<svg") == 2 and "&lt;i&gt;" in page and "between 1 and 4" in page
    loaded = re.findall(r'(?:src|href)="([^"#][^"]*)"|url\(([^#][^)]*)\)|@import', page)
    assert not loaded, loaded
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', page)) <= set(ids)


def test_none_is_measured_first_since_its_texts_are_the_measure() -> None:
    args = parse(["--methods", "suffix,none,ngram", "--users", "1,4"])
    assert args.methods == ["none", "suffix", "ngram"] and args.users == [1, 4]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--protocol", "openai"], "--url"),
        (["--seconds", "4", "--warm-up", "4"], "--warm-up must be below --seconds"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    given: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(given)
    assert reason in capsys.readouterr().err
