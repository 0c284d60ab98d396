"""The HTTP client's reading of events and refusals, without a server."""

from __future__ import annotations

import pytest

from clients import http_generate


def test_events_are_read_from_data_lines_only() -> None:
    lines = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b":\ndata: 2}\n\ndata: {"c": 3}'.splitlines(True)
    assert list(http_generate.events(lines)) == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_events_error_amid_the_text_is_raised() -> None:
    found = http_generate.events(
        [b'data: {"text_output": "a"}\n', b"\n", b'data: {"error": "the pool is full"}\n', b"\n"]
    )
    assert next(found) == {"text_output": "a"}
    with pytest.raises(http_generate.ServerError, match="the pool is full"):
        next(found)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": "no"}', "no"),
        (b'data: {"error":"no"}\n\n', "no"),
        (b"nonsense", "nonsense"),
        (b"\xff", "\ufffd"),
        (b'["x"]', '["x"]'),
        (b"", "the server gave no reason"),
    ],
)
def test_refusal_is_found_in_any_body(body: bytes, words: str) -> None:
    assert http_generate.refusal(body) == words


@pytest.mark.parametrize(
    ("flag", "number", "allowed"), [("--max-tokens", 2**32 + 4, "-2147483648..2147483647"), ("--seed", -1, "0..")]
)
def test_numbers_that_triton_would_cut_are_refused(
    flag: str, number: int, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        http_generate.parse(["x", f"{flag}={number}"])
    assert f"must be in {allowed}" in capsys.readouterr().err
