"""The load test's users: what a stream's figures are, that another text is a failure, and how prompts and chunks are read."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

with patch.dict(os.environ, LOCUST_SKIP_MONKEY_PATCH="1"):  # the other tests need threads as they are
    from clients import locustfile
    from clients.locustfile import Arrivals, Chunk, Ledger, Refused, Stream, TextDiffers


def stream_of(*chunks: tuple[float, str, int], **totals: int) -> Stream:
    """Return a stream whose chunks came at these times."""
    stream = Stream("suffix", "edit-00")
    for at, (_, text, tokens) in enumerate(chunks):
        stream.add(Chunk(text, tokens, totals if at + 1 == len(chunks) else {}))
    stream.times = [at_s for at_s, _, tokens in chunks if tokens]
    return stream


def test_statistics_of_a_stream() -> None:
    stream = stream_of((0.5, "a", 1), (0.7, "bcd", 3), (1.0, "ef", 2), (1.1, "", 0), num_steps=3)
    found: dict[str, list[float]] = {}
    for name, value in stream.statistics():
        found.setdefault(name, []).append(value)
    assert found == {
        "first token, ms": [500],
        "inter-token, us": [pytest.approx(100_000)],  # 5 tokens after the first, in 0.5 s
        "tokens/s": [pytest.approx(10)],
        "inter-chunk, us": [pytest.approx(200_000), pytest.approx(300_000)],
        "tokens/chunk x100": [200],
        "acceptance length x100": [200],
    }
    assert stream.text == "abcdef" and stream.num_tokens == 6


def test_chunks_of_every_protocol_are_read_alike() -> None:
    last = {"text_output": "b", "num_output_tokens": 2, "num_steps": 3, "finish_reason": "length"}
    assert locustfile.triton_chunk(last) == Chunk("b", 2, {"num_steps": 3})
    assert locustfile.triton_chunk({"text_output": "a", "num_output_tokens": 1}) == Chunk("a", 1, {})
    assert locustfile.openai_chunk({"choices": [{"text": "a"}]}) == Chunk("a", None, {})
    usage = {"usage": {"completion_tokens": 7}, "metrics": {"speculative_decoding": {"num_spec_steps": 3}}}
    assert locustfile.openai_chunk({"choices": [], **usage}) == Chunk("", None, {"num_tokens": 7, "num_steps": 3})
    assert locustfile.openai_chunk({"choices": [], "usage": None}) == Chunk("", None, {})


def test_tokens_that_the_protocol_does_not_count_come_with_the_last_chunk() -> None:
    stream = Stream("suffix", "edit-00")
    for chunk in (Chunk("ab", None, {}), Chunk("", None, {"num_tokens": 7, "num_steps": 3})):
        stream.add(chunk)
    assert (stream.num_tokens, stream.num_steps, len(stream.times)) == (7, 3, 1)


def record(prompt: str, text: str) -> dict[str, Any]:
    stream = Stream("suffix", prompt)
    stream.text = text
    return stream.record()


def test_another_text_of_a_prompt_is_a_failure_within_a_run_and_against_an_earlier_one(tmp_path: Path) -> None:
    texts = str(tmp_path / "texts.json")
    ledger = Ledger("", texts, "seed=1")
    ledger.check(record("a", "text"))
    ledger.check(record("b", "other"))
    ledger.check(record("a", "text"))
    with pytest.raises(TextDiffers, match="prompt a"):
        ledger.check(record("a", "texT"))
    ledger.write()
    with pytest.raises(TextDiffers):
        Ledger("", texts, "seed=1").check(record("b", "text"))
    Ledger("", texts, "seed=2").check(record("b", "text"))  # another seed, another text


@pytest.mark.parametrize(
    ("arrivals", "at_s", "expected"),
    [
        ("closed", 3.0, (8, 8)),
        ("closed", 30.0, None),
        ("poisson", 3.0, (8, 8)),
        ("step", 9.0, (1, 1)),
        ("step", 10.0, (4, 4)),
        ("step", 20.0, None),
    ],
)
def test_numbers_of_users(arrivals: str, at_s: float, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(arrivals=arrivals, steps="1,4", step_seconds=10.0, run_time=30, num_users=8)
    shape = Arrivals()
    shape.runner = SimpleNamespace(environment=SimpleNamespace(parsed_options=options))
    monkeypatch.setattr(shape, "get_run_time", lambda: at_s)
    assert shape.tick() == expected


class Response(SimpleNamespace):
    def __iter__(self) -> Any:
        return iter(self.lines)

    def read(self, limit: int) -> bytes:
        return b"".join(self.lines)


def answer_with(response: Response, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*given: Any, **named: Any) -> Any:
        return SimpleNamespace(request=lambda *given: None, getresponse=lambda: response, close=lambda: None)

    monkeypatch.setattr(locustfile.http.client, "HTTPConnection", connect)


@pytest.mark.parametrize(
    ("status", "lines", "reason"),
    [
        (200, [b'data: {"error": "no room"}\n'], "no room"),
        (200, [b'data: {"choices": []}\n', b'data: {"error": {"message": "no room"}}\n'], "no room"),
        (503, [b"busy"], "HTTP 503: busy"),
    ],
)
def test_errors_over_http_are_refusals(
    status: int, lines: list[bytes], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(Response(status=status, lines=lines), monkeypatch)
    with pytest.raises(Refused, match=reason):
        list(locustfile.server_sent("localhost:1", "/path", {}, 1.0))
