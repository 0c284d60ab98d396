"""Hidden states for the heads against hooks on the stock model: through steps, trees, moved rows and prefix hits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from auditor.reference import decoding as reference
from benchmarks.stock_model import StockModel
from orchestrator.core.context import Context
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import HiddenStates, StepOptions
from runtime.models.fused import fuse_norms
from tests.support.engines import EngineTarget, make_paged, start_target
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_target

RNG = np.random.default_rng(3)
NUM_LAYERS = 8
HIDDEN_SIZE = 32
KINDS = [
    (HiddenStates.LAST, HIDDEN_SIZE),
    (HiddenStates.LAYERS, 3 * HIDDEN_SIZE),
    (HiddenStates.LAST | HiddenStates.LAYERS, 4 * HIDDEN_SIZE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("deep"), num_hidden_layers=NUM_LAYERS, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def plain(folder: Path) -> StockModel:
    return StockModel(folder)


class Hooked:
    """The stock model, and what goes into each of its decoder layers."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        fuse_norms(self.model)
        self.inputs: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            layer.register_forward_pre_hook(lambda _, args: self.inputs.append(args[0][0]))

    @torch.inference_mode()
    def states(self, ids: list[int], kind: HiddenStates) -> np.ndarray:
        """Return (n, width) float32 features of every position."""
        self.inputs.clear()
        output = self.model.model(input_ids=torch.tensor([ids]), use_cache=False)
        last = [output.last_hidden_state[0]] if HiddenStates.LAST in kind else []
        layers = [self.inputs[i] for i in (2, NUM_LAYERS // 2, NUM_LAYERS - 3)] if HiddenStates.LAYERS in kind else []
        return torch.cat([*last, *layers], dim=-1).float().numpy()


@pytest.fixture(scope="module")
def hooked(folder: Path) -> Hooked:
    return Hooked(folder)


def random_ids(length: int) -> list[int]:
    return RNG.integers(1, VOCAB_SIZE, length).tolist()


def close(ours: np.ndarray | None, truth: np.ndarray) -> bool:
    return ours is not None and ours.shape == truth.shape and bool(np.allclose(ours, truth, rtol=1e-6, atol=1e-6))


@pytest.mark.parametrize(("kind", "width"), KINDS)
def test_features_of_every_step_equal_the_stock_model_s(
    folder: Path, plain: StockModel, hooked: Hooked, kind: HiddenStates, width: int
) -> None:
    """Trees whose accepted nodes stand after rejected ones, so that their rows move."""
    engine = start_target(make_paged(folder, features=kind))
    prompt = random_ids(14)
    truth = reference.generate(plain.logits, prompt, Sampling(), 30)
    context, target = Context(prompt), EngineTarget(engine, 1)
    try:
        while len(context.output) < 25:
            done, depth = len(context.output), int(RNG.integers(0, 5))
            wrong = (truth[done] + 1) % VOCAB_SIZE
            tree = TokenTree.from_paths([[wrong, 1], truth[done : done + depth]])
            first = int(RNG.integers(0, len(context)))
            answer = target.step(context, tree, Sampling(), StepOptions(features_from=first, hidden_states=kind))
            assert len(answer.path) == depth
            states = hooked.states(context.ids + answer.tokens(tree)[:-1], kind)
            assert answer.features_start == first
            assert close(answer.features, states[first:])
            assert answer.features is not None and answer.features.shape[1] == width
            context.commit(answer.tokens(tree))
    finally:
        engine.close()
    assert context.output == truth[: len(context.output)]


@pytest.mark.parametrize("wanted", [HiddenStates.LAST, HiddenStates.LAYERS])
def test_a_head_is_sent_the_states_that_it_reads_alone(folder: Path, hooked: Hooked, wanted: HiddenStates) -> None:
    engine = start_target(make_paged(folder, features=HiddenStates.LAST | HiddenStates.LAYERS))
    ids = random_ids(9)
    try:
        options = StepOptions(features_from=2, hidden_states=wanted)
        answer = EngineTarget(engine, 1).step(Context(ids), TokenTree.bare(), Sampling(), options)
    finally:
        engine.close()
    assert close(answer.features, hooked.states(ids, wanted)[2:])


def test_states_that_the_deployment_does_not_keep_are_not_sent(folder: Path) -> None:
    engine = start_target(make_paged(folder, features=HiddenStates.LAST))
    try:
        options = StepOptions(features_from=0, hidden_states=HiddenStates.LAYERS)
        answer = EngineTarget(engine, 1).step(Context([1, 2, 3]), TokenTree.bare(), Sampling(), options)
    finally:
        engine.close()
    assert answer.features is None


def test_the_newest_512_rows_are_sent_at_most(folder: Path, hooked: Hooked) -> None:
    engine = start_target(make_paged(folder, features=HiddenStates.LAST, memory_mb=16))
    ids = random_ids(600)
    try:
        answer = EngineTarget(engine, 1).step(
            Context(ids), TokenTree.bare(), Sampling(), StepOptions(features_from=5, hidden_states=HiddenStates.LAST)
        )
    finally:
        engine.close()
    assert answer.features_start == 88
    assert close(answer.features, hooked.states(ids, HiddenStates.LAST)[88:])


@pytest.mark.parametrize("features_from", [9, 10, 11, 10**6, -3])
def test_a_drafter_that_lies_about_its_reach_breaks_no_step(
    folder: Path, plain: StockModel, features_from: int
) -> None:
    """Nine tokens are computed, positions 0 … 8; a head may claim to have seen more."""
    engine = start_target(make_paged(folder, features=HiddenStates.LAST))
    ids = random_ids(9)
    try:
        target = EngineTarget(engine, 1)
        answer = target.step(
            Context(ids),
            TokenTree.bare(),
            Sampling(),
            StepOptions(features_from=features_from, hidden_states=HiddenStates.LAST),
        )
    finally:
        engine.close()
    assert answer.next_token == int(plain.logits(ids).argmax())
    assert len(answer.features if answer.features is not None else []) == (9 if features_from < 0 else 0)
