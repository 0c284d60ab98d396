"""A target step that fails half-way: the others in its pass are answered at once, and exactly."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from auditor.reference import decoding as reference
from benchmarks.stock_model import StockModel
from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, UnknownSequence
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, StepOptions
from runtime.engine.paged import PagedModel
from runtime.engine.target import StepCall, TargetEngine
from runtime.engine.thread import EngineThread
from runtime.engine.verify import VerifyResult
from tests.support.engines import ask, make_paged, submit
from tests.support.tiny_models import VOCAB_SIZE

RNG = np.random.default_rng(2)


def random_ids(length: int) -> list[int]:
    return RNG.integers(1, VOCAB_SIZE, length).tolist()


def step(context: Context, tree: TokenTree, sequence_id: int, sent: int = 0) -> StepRequest:
    return StepRequest(delta_of(context, sent, sequence_id, ""), tree, Sampling(), StepOptions(), 60_000)


class Failing(TargetEngine):
    """Breaks on sequence 2, at a chosen place in its step."""

    def __init__(self, paged: PagedModel, place: str) -> None:
        super().__init__(paged)
        self.place = place

    def _settle(self, call: StepCall, logits: torch.Tensor, result: VerifyResult) -> Acceptance:
        if call.sequence_id == 2 and self.place == "after the forward pass":
            raise RuntimeError("boom")
        answer = super()._settle(call, logits, result)
        if call.sequence_id == 2 and self.place == "after its commit":
            raise RuntimeError("boom")
        return answer


@pytest.mark.parametrize("place", ["after the forward pass", "after its commit"])
def test_a_step_that_raises_does_not_affect_other_calls(folder: Path, plain: StockModel, place: str) -> None:
    """Three sequences in their second step, number 2 in the middle; the first is answered before the failure."""
    paged = make_paged(folder)
    engine: EngineThread[StepRequest] = EngineThread(TargetEngine(paged), "before")
    engine.start()
    contexts = {i: Context(random_ids(9 + 5 * i)) for i in (1, 2, 3)}
    truths = {i: reference.generate(plain.logits, c.ids, Sampling(), 5) for i, c in contexts.items()}
    for i, context in contexts.items():
        context.commit([ask(engine, step(context, TokenTree.bare(), i)).next_token])
    engine.close()

    engine = EngineThread(Failing(paged, place), "failing")
    trees = {i: TokenTree.from_paths([[1, 2], truth[1:3]]) for i, truth in truths.items()}
    answers = {i: submit(engine, step(context, trees[i], i, sent=len(context) - 1)) for i, context in contexts.items()}
    began_s = time.monotonic()
    engine.start()
    try:
        assert isinstance(answers[2].get(timeout=20), EngineError)
        for i in (1, 3):
            answer = answers[i].get(timeout=20)
            assert answer.tokens(trees[i]) == truths[i][1:4]
            contexts[i].commit(answer.tokens(trees[i]))
            later = ask(engine, step(contexts[i], TokenTree.bare(), i, sent=len(contexts[i]) - 3))
            assert later.next_token == truths[i][4]
        assert time.monotonic() - began_s < 20
        with pytest.raises(UnknownSequence):
            ask(engine, step(contexts[2], TokenTree.bare(), 2, sent=len(contexts[2]) - 1))
    finally:
        engine.close()
