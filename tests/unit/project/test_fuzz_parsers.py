"""The parsers under random bytes and under their seeds with random changes: what atheris does for longer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import PARSERS

pytestmark = pytest.mark.unit


@st.composite
def changed(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A seed in which some pieces are cut out, doubled or replaced."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(start + draw(st.integers(0, 12)), len(data))
        data[start:end] = draw(st.one_of(st.binary(max_size=8), st.just(bytes(data[start:end]) * 2)))
    return bytes(data)


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_reads_its_seeds(name: str) -> None:
    for seed in PARSERS[name].seeds:
        PARSERS[name].check(seed)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_parser_raises_nothing_but_its_errors(name: str, data: st.DataObject) -> None:
    parser = PARSERS[name]
    parser.check(data.draw(st.one_of(changed(parser.seeds), st.binary(max_size=64))))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("deployment", b'target = "~no such user/x"'),
        ("checkpoint", b'{"vocab_size": 8, "max_position_embeddings": 64, "eos_token_id": [{}]}'),
        ("checkpoint", b'{"vocab_size": 8, "max_position_embeddings": 64, "text_config": 3}'),
    ],
)
def test_what_was_found_stays_mended(name: str, data: bytes) -> None:
    PARSERS[name].check(data)
