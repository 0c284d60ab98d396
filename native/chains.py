"""The structures of a call that drafts chains (chains.cpp)."""

from __future__ import annotations

import math
from ctypes import Structure, c_double, c_int32, c_void_p
from dataclasses import dataclass

from native.ranking import RankingFields
from orchestrator.core.sampling_params import Sampling


@dataclass(frozen=True)
class NativeChain:
    """The chain after one segment of a pass: at most `length` tokens, each argmax(log q + the target's noise).

    min_score: the chain ends after a token whose path has a lower log-confidence. sharpness: how sure the model is of
    its guesses.
    """

    segment: int
    length: int
    sampling: Sampling
    min_score: float = -math.inf
    sharpness: float = 1.0


class ChainFields(Structure):
    """One chain, as `native::Chain`."""

    _fields_ = [("ranking", RankingFields), ("min_score", c_double), ("segment", c_int32), ("length", c_int32)]


class ChainsFields(Structure):
    """The chains of a call, as `native::Chains`; the arrays must outlive the call."""

    _fields_ = [
        ("num_chains", c_int32),
        ("max_length", c_int32),
        ("chains", c_void_p),
        ("tokens", c_void_p),
        ("lengths", c_void_p),
    ]
