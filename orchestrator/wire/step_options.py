"""What a step shall answer beside the accepted path, as flat tensors (docs/protocol.md, Target wire)."""

from __future__ import annotations

from enum import IntFlag

import numpy as np

from orchestrator.core.types import HiddenStates, StepOptions
from orchestrator.wire.engine_speculation import pack_engine_speculation, unpack_engine_speculation
from orchestrator.wire.tensors import Incoming, Tensors, pack_ids, scalar


class StepOptionBits(IntFlag):
    """The bits of `want`."""

    PICKS = 1
    LOGPROBS = 2
    FEATURES = 4
    LAYER_FEATURES = 8


_STATE_BITS = {HiddenStates.LAST: StepOptionBits.FEATURES, HiddenStates.LAYERS: StepOptionBits.LAYER_FEATURES}


def pack_step_options(options: StepOptions) -> Tensors:
    """Pack it; what is not wanted is omitted."""
    bits = StepOptionBits.PICKS * options.target_tokens | StepOptionBits.LOGPROBS * options.logprobs
    tensors: Tensors = {}
    if options.features_from is not None:
        bits |= sum(bit for state, bit in _STATE_BITS.items() if state in options.states)
        tensors["features_from"] = np.array([options.features_from], np.int32)
    tensors |= pack_ids("want", [bits]) | pack_ids("num_top", [options.num_top] if options.num_top else [])
    return tensors | pack_engine_speculation(options.engine_speculation)


def unpack_step_options(tensors: Incoming) -> StepOptions:
    """Unpack it; raises EngineError when a tensor breaks a law."""
    bits = StepOptionBits(scalar(tensors, "want", 0))
    states = HiddenStates(sum(state for state, bit in _STATE_BITS.items() if bit in bits))
    features_from = scalar(tensors, "features_from", 0) if states else None
    target_tokens, logprobs = bool(bits & StepOptionBits.PICKS), bool(bits & StepOptionBits.LOGPROBS)
    num_top, inside = scalar(tensors, "num_top", 0), unpack_engine_speculation(tensors)
    return StepOptions(target_tokens, logprobs, features_from, num_top, states or HiddenStates.LAST, inside)
