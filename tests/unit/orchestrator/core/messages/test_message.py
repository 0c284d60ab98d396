"""The message that carries the tensors of a call."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.message import decode, encode
from orchestrator.core.messages.tensors import Tensors

TENSORS: Tensors = {
    "sequence_id": np.array([2**63 + 5], np.uint64),
    "release": np.array([True, False, True]),
    "ids": np.array([3, -1, 7], np.int32),
    "salt": np.array(["schönes Salz".encode()], np.object_),
    "features": np.arange(6, dtype=np.float32).reshape(2, 3),
    "logprobs": np.array([-0.1, -2.5]),
    "nothing": np.empty((0, 4), np.float32),
}


def test_message_returns_what_was_packed() -> None:
    found = decode(encode(TENSORS))
    assert list(found) == list(TENSORS)
    for name, array in TENSORS.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert (found[name] == array).all()
    assert decode(encode({})) == {}


def test_values_are_aligned() -> None:
    """Unaligned values are slow, and torch refuses them."""
    message = np.frombuffer(bytearray(encode(TENSORS).tobytes()), np.uint8)
    assert all(array.flags.aligned for name, array in decode(message).items() if name != "salt")


@pytest.mark.parametrize("length", (0, 3, 10, 60, -8, -1))
def test_a_message_that_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(EngineError, match="message"):
        decode(encode(TENSORS)[:length])


@pytest.mark.parametrize("header", (b"a:int32:-1;   ", b"a:int64:1; ", b"a:int32:x;", b"nothing;", b"\xff\xff;"))
def test_a_malformed_header_is_refused(header: bytes) -> None:
    message = np.frombuffer(len(header).to_bytes(4, "little") + header + bytes(8), np.uint8)
    with pytest.raises(EngineError, match="malformed"):
        decode(message)
