"""Options and results of engine-side speculation: invalid ones are refused."""

from __future__ import annotations

import pytest

from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest, pack_acceptance, pack_step, unpack_acceptance, unpack_step
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, EngineSpeculation, EngineSpeculationResult, StepOptions
from tests.unit.orchestrator.core.messages.strategies import MAX_NODES, VOCAB_SIZE


@pytest.mark.parametrize(("extra", "lengths"), [((5, 6), (2,)), ((5,), (1, 2)), ((), (0, 1)), ((5,), (3, -1))], ids=str)
def test_result_whose_passes_do_not_add_up_to_its_tokens_is_refused(
    extra: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    tensors = pack_acceptance(
        Acceptance((), 7, engine_speculation=EngineSpeculationResult("medusa", extra, lengths, 3))
    )
    with pytest.raises(EngineError, match="but passes of"):
        unpack_acceptance(tensors, TokenTree.bare())


@pytest.mark.parametrize("inside", [EngineSpeculation(0), EngineSpeculation(3, sizes=(4, 3))])
def test_invalid_engine_options_are_refused(inside: EngineSpeculation) -> None:
    delta = delta_of(Context([1]), 0, 1, "")
    tensors = pack_step(StepRequest(delta, TokenTree.bare(), Sampling(), StepOptions(engine_speculation=inside), 1000))
    with pytest.raises(EngineError, match="speculation_length must be 1 or more"):
        unpack_step(tensors, VOCAB_SIZE, MAX_NODES)
