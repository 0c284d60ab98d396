"""The structure of a call that makes several plain steps (decode.cpp)."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_void_p
from typing import NamedTuple

from orchestrator.core.types import IdArray
from orchestrator.native.sampling import Requests


class DecodingFields(Structure):
    """Up to num_steps tokens for every segment, as `native::Decoding`; the arrays must outlive the call."""

    _fields_ = [
        ("num_steps", c_int32),
        ("limit_us", c_int32),
        *((name, c_void_p) for name in ("interrupt", "requests", "verify", "tokens", "times_us")),
        ("num_made", c_int32),
    ]


class Decoding(NamedTuple):
    """What plain steps need besides their segments.

    requests: (segments,), how each sequence is sampled; their rule is `coupled`. verify: the address of the function
    that decides them. num_steps, limit_s: most steps, and the time after which none begins. interrupt: no step begins
    once it is not 0; any thread may set it.
    """

    requests: Requests
    verify: int
    num_steps: int
    limit_s: float
    interrupt: ctypes.c_int32


class Decoded(NamedTuple):
    """The steps that were made. tokens: (steps, segments). times_us: (steps, 2), of each pass and of its decision."""

    tokens: IdArray
    times_us: IdArray
