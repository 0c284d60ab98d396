"""The codes of a server that takes no request now: declared by the server and by the gateway, which must agree."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from gateway import triton
from orchestrator.core.errors import Draining, QueueFull, RequestError, Unavailable, public_text

pytestmark = pytest.mark.unit

PROTOCOL = Path(__file__).parents[3] / "docs/protocol.md"
KINDS = (Unavailable, *Unavailable.__subclasses__(), *QueueFull.__subclasses__())
TEXT = "32 requests run: try again in 7 s"


def test_the_gateway_and_the_specification_know_the_servers_codes_and_no_others() -> None:
    codes = {kind.code for kind in KINDS}
    _, _, section = PROTOCOL.read_text(encoding="utf-8").partition("**Errors")
    listed = re.findall(r"^\| `([a-z_]+):`", section.partition("**Defaults")[0], re.MULTILINE)
    assert len(codes) == len(KINDS) == 4
    assert set(triton.BY_CODE) == codes == set(listed) and len(listed) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_gateway_takes_a_server_that_gives_a_code_for_healthy_and_shows_its_words_alone(
    kind: type[Unavailable],
) -> None:
    error = triton._error(grpc.StatusCode.UNAVAILABLE, public_text(kind(TEXT)))
    assert isinstance(error, triton.ReplicaDraining if kind is Draining else triton.ReplicaFull) and str(error) == TEXT
    if isinstance(error, triton.ReplicaFull):
        assert error.is_for_all == (kind is QueueFull) and error.retry_after_s == 7


@pytest.mark.parametrize("text", ["failed to connect to all addresses", "Socket closed", "", "busy", "ready: full: x"])
def test_a_text_without_a_code_is_that_of_a_replica_that_is_lost(text: str) -> None:
    assert isinstance(triton._error(grpc.StatusCode.UNAVAILABLE, text), triton.ReplicaLost)


def test_tritons_own_end_is_no_loss() -> None:
    said = "Server is stopping, scheduler for model has stopped accepting new inference requests"
    assert isinstance(triton._error(grpc.StatusCode.UNAVAILABLE, said), triton.ReplicaDraining)


def test_a_wrong_request_has_no_code_and_cannot_bring_one() -> None:
    quoted = RequestError("full: max_tokens must be in 1..4096")
    assert public_text(quoted) == str(quoted)
    assert isinstance(triton._error(grpc.StatusCode.INVALID_ARGUMENT, public_text(quoted)), triton.Refused)
