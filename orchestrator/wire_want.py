"""What a step shall answer beside the accepted path, as flat tensors (docs/protocol.md, Target wire)."""

from __future__ import annotations

from enum import IntFlag

import numpy as np

from orchestrator.tensors import Incoming, Tensors, pack_ids, scalar
from orchestrator.types import States, Want
from orchestrator.wire_inside import pack_inside, unpack_inside


class WantBits(IntFlag):
    """The bits of `want`."""

    PICKS = 1
    LOGPROBS = 2
    FEATURES = 4
    LAYER_FEATURES = 8


_STATE_BITS = {States.LAST: WantBits.FEATURES, States.LAYERS: WantBits.LAYER_FEATURES}


def pack_want(want: Want) -> Tensors:
    """Pack it; what is not wanted is omitted."""
    bits = WantBits.PICKS * want.picks | WantBits.LOGPROBS * want.logprobs
    tensors: Tensors = {}
    if want.features_from is not None:
        bits |= sum(bit for state, bit in _STATE_BITS.items() if state in want.states)
        tensors["features_from"] = np.array([want.features_from], np.int32)
    tensors |= pack_ids("want", [bits]) | pack_ids("num_top", [want.num_top] if want.num_top else [])
    return tensors | pack_inside(want.inside)


def unpack_want(tensors: Incoming) -> Want:
    """Unpack it; raises EngineError when a tensor breaks a law."""
    bits = WantBits(scalar(tensors, "want", 0))
    states = States(sum(state for state, bit in _STATE_BITS.items() if bit in bits))
    features_from = scalar(tensors, "features_from", 0) if states else None
    picks, logprobs = bool(bits & WantBits.PICKS), bool(bits & WantBits.LOGPROBS)
    num_top, inside = scalar(tensors, "num_top", 0), unpack_inside(tensors)
    return Want(picks, logprobs, features_from, num_top, states or States.LAST, inside)
