"""Heads in native code draft the trees that the torch engines draft, whatever shares the call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import EngineError
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.static_trees import tree_of_choices
from orchestrator.core.tree import TokenTree
from runtime.models.check import products_in_bfloat16
from runtime.models.heads import build_heads
from runtime.models.heads.engines.base import HeadEngine
from runtime.models.heads.engines.eagle import EagleEngine
from runtime.models.heads.engines.medusa import MedusaEngine
from runtime.models.heads.engines.ranking import rank
from runtime.models.heads.engines.redrafter import RedrafterEngine
from runtime.models.heads.modules.medusa import MedusaHeads
from runtime.models.native.draft_calls import NativeDraft
from runtime.models.native.head_weights import unsupported_head
from tests.support.choice_trees import published_choices
from tests.support.heads import HIDDEN_SIZE, draft, load, make_head, make_target, native_or_skip, paths_of, request
from tests.support.tiny_models import VOCAB_SIZE

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "medusa:blocks": ("medusa", {"num_heads": 3, "num_layers": 2, "repeated_block": False, "file": "pt"}),
    "medusa:one-lm-head": ("medusa", {"lm_heads": False}),
    "eagle": ("eagle", {"wide": True}),
    "eagle:no-bias": ("eagle", {"wide": True, "bias": False}),
    "eagle:qkv-bias": ("eagle", {"wide": True, "qkv_bias": True}),
    "eagle3": ("eagle3", {"wide": True}),
    "eagle3:own-width": ("eagle3", {"wide": True, "hidden_size": 64}),
    "eagle3:whole-vocabulary": ("eagle3", {"wide": True, "draft_vocab_size": VOCAB_SIZE}),
    "eagle3:fc-norm": ("eagle3", {"wide": True, "norms": ("fc_norm", "norm_output")}),
    "eagle3:norm-before-fc": ("eagle3", {"wide": True, "norms": ("norm_before_fc",), "hidden_size": 64}),
    "eagle3:norm-output": ("eagle3", {"wide": True, "norms": ("norm_output",)}),
    "eagle3:norm-before-residual": ("eagle3", {"wide": True, "norms": ("norm_before_residual",)}),
    "redrafter": ("redrafter", {}),
    "redrafter:projected": ("redrafter", {"exit_dim": 48, "num_layers": 2}),
    "redrafter:no-recurrence": ("redrafter", {"rnn": False}),
}
SAMPLINGS = (
    Sampling(),
    Sampling(0.8, seed=7),
    Sampling(1.3, top_k=9, seed=2**63 + 11),
    Sampling(0.7, top_p=0.8, rule=Rule.REJECTION),
    Sampling(1.0, min_p=0.05, top_p=0.95, seed=5),
    Sampling(1.1, typical_p=0.7, rule=Rule.BLOCK),
)
SHAPES: tuple[dict[str, Any], ...] = (
    {"width": 3, "max_depth": 4, "max_nodes": 10},
    {"width": 6, "max_depth": 3, "max_nodes": 60},
    {"width": 1, "max_depth": 4, "max_nodes": 3},
    {"choices": tree_of_choices(published_choices("eagle1_25")), "max_depth": 9},
    {"choices": tree_of_choices(published_choices("eagle1_25")), "max_depth": 2, "max_nodes": 9},
    {"width": 4, "max_depth": 1, "max_nodes": 2},
    {"width": 5, "max_depth": 4, "max_nodes": 30, "min_prob": 0.05, "sharpness": 0.3},
    {"width": 4, "max_depth": 4, "max_nodes": 12, "draws": True},
    {"width": 5, "max_depth": 4, "max_nodes": 40, "draws": True, "min_prob": 0.1, "sharpness": 0.2},
    {"width": 1, "max_depth": 4, "draws": True, "sharpness": 0.5},
    {"choices": tree_of_choices(published_choices("eagle1_25")), "max_depth": 9, "draws": True, "min_prob": 0.3},
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


class Pair:
    """A random head's engines in torch and in native code; torch computes in float32.

    dtype: of the products. Torch's inputs are rounded to bfloat16 by whoever compares with it.
    """

    def __init__(
        self, kind: str, folder: Path, target: Path, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        self.kind = kind
        self.head = load(kind, make_head(kind, folder, **options), target, dtype)
        self.native = native_or_skip(self.head)
        self.head.float()
        self.width = HIDDEN_SIZE * (3 if kind == "eagle3" else 1)

    def engine(self, native: bool = True) -> HeadEngine:
        chosen = self.native if native else None
        if self.kind == "medusa":
            return MedusaEngine(self.head, chosen)
        if self.kind == "redrafter":
            return RedrafterEngine(self.head, chosen)
        return EagleEngine(self.head, memory_mb=2, block_tokens=4, native=chosen)

    def requests(self, **changes: Any) -> list[Any]:
        """Return calls of every sampling and shape, with contexts of several lengths."""
        rng, found = np.random.default_rng(3), []
        for number, sampling in enumerate(SAMPLINGS):
            for shape in SHAPES:
                length = int(rng.integers(2, 40))
                ids = rng.integers(1, VOCAB_SIZE, length).tolist()
                features = rng.normal(0, 1, (length - 1, self.width))
                sequence_id = len(found) + 1
                salt = str(number)
                draws = shape.get("draws", False) and sampling.rule.uses_q
                shape = {**shape, "draws": draws}
                found.append(
                    request(ids, features, sampling=sampling, sequence_id=sequence_id, salt=salt, **shape | changes)
                )
        return found

    def draft_together(self, calls: list[Any]) -> list[Any]:
        """Return native code's answers to calls that come nine at a time."""
        engine = self.engine()
        return [answer for first in range(0, len(calls), 9) for answer in draft(engine, *calls[first : first + 9])]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    kind, options = KINDS[request.param]
    return Pair(kind, tmp_path_factory.mktemp(kind), target, **options)


def test_the_trees_are_those_of_the_torch_engine(pair: Pair) -> None:
    for call in pair.requests():
        (expected,), (found,) = draft(pair.engine(native=False), call), draft(pair.engine(), call)
        assert paths_of(found) == paths_of(expected), call
        assert found.cached_len == expected.cached_len
        assert bool(found.q) == call.head.draws
        for ours, theirs in zip(found.q, expected.q, strict=True):
            assert ours.ids.tolist() == theirs.ids.tolist()
            assert ours.probs == pytest.approx(theirs.probs, rel=1e-4)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "redrafter:projected"])
def test_in_bfloat16_the_products_are_those_of_rounded_inputs(kind: str, target: Path, tmp_path: Path) -> None:
    """An input that another order of sums rounds differently moves a logit, so that now and then a tree differs."""
    name, options = KINDS[kind]
    pair = Pair(name, tmp_path, target, torch.bfloat16, **options)
    calls = pair.requests()
    alone = [draft(pair.engine(), call)[0] for call in calls]
    assert [paths_of(answer) for answer in pair.draft_together(calls)] == [paths_of(answer) for answer in alone]
    with products_in_bfloat16(pair.head):
        expected = [draft(pair.engine(native=False), call)[0] for call in calls]
    unrounded = [draft(pair.engine(native=False), call)[0] for call in calls]
    assert _num_equal(alone, expected) >= 0.95 * len(calls) > _num_equal(alone, unrounded)


def _num_equal(answers: list[Any], others: list[Any]) -> int:
    return sum(paths_of(answer) == paths_of(other) for answer, other in zip(answers, others, strict=True))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_tree_does_not_depend_on_what_shares_the_call(pair: Pair, num_threads: int) -> None:
    calls = pair.requests()
    alone = [draft(pair.engine(), call)[0] for call in calls]
    pair.native.num_threads = num_threads
    try:
        together = pair.draft_together(calls)
    finally:
        pair.native.num_threads = None
    assert [paths_of(answer) for answer in together] == [paths_of(answer) for answer in alone]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("size", [40, 300, 3000])
def test_ranks_are_those_of_the_torch_engine_in_a_large_vocabulary(sampling: Sampling, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    heads = MedusaHeads(1, 0, torch.randn(size, 32, generator=generator)).eval().requires_grad_(False)
    engine, state = MedusaEngine(heads, native_or_skip(heads)), torch.randn(20, 32, generator=generator)
    for row in range(len(state)):
        call = request([1, 2], state[row, None].numpy(), sampling=sampling, width=12, max_depth=1)
        ranked = rank(heads[0](state[row, None]), [2], [sampling], 12)
        expected = [token for token, score in zip(*(x[0].tolist() for x in ranked), strict=True) if score > -np.inf]
        assert draft(engine, call)[0].tree.tokens.tolist() == expected


def test_of_equal_tokens_the_lowest_come_first() -> None:
    table = torch.zeros(2000, 16)
    table[[1900, 1200, 700]] = 1.0
    heads = MedusaHeads(1, 0, table).eval().requires_grad_(False)
    call = request([1, 2], np.ones((1, 16)), sampling=Sampling(), width=5, max_depth=1)
    (answer,) = draft(MedusaEngine(heads, native_or_skip(heads)), call)
    assert answer.tree.tokens.tolist() == [700, 1200, 1900, 0, 1]


def test_a_draft_without_time_has_one_level(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.models.heads.engines.drafts.TimeBudget.limit_s", lambda budget, call: 0.0)
    answers = pair.draft_together(pair.requests())
    assert max(int(answer.tree.depths.max()) for answer in answers) == 1


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tokens": [5, VOCAB_SIZE]}, "tokens: a token outside"),
    ({"tokens": [5, -1]}, "tokens: a token outside"),
    ({"max_nodes": 0}, "max_nodes"),
    ({"max_nodes": 129}, "max_nodes"),
    ({"width": 0}, "no shape"),
    ({"max_depth": 0}, "no shape"),
    ({"choices": TokenTree(np.array([0, 0], np.int32), np.array([0, 2], np.int32))}, "choice_parents"),
    ({"choices": TokenTree(np.array([0, -1], np.int32), np.array([0, 0], np.int32))}, "choice_ranks"),
    ({"blocks": [10**6, 1]}, "blocks: a block outside"),
    ({"blocks": [-1, 1]}, "blocks: a block outside"),
    ({"blocks": [1]}, "num_blocks: too few"),
    ({"first_slot": 0}, "first_slot"),
    ({"first_slot": 2}, "first_slot"),
    ({"position": 40}, "first_slot"),
    ({"gap": range(1, 3)}, "the newest row is missing"),
    ({"draws": True}, "draws"),
    ({"draws": True, "sampling": Sampling(1.0)}, "draws"),
    ({"sharpness": 0.0}, "sharpness"),
    ({"sharpness": 1.5}, "sharpness"),
)


@pytest.mark.parametrize(("changes", "words"), BAD, ids=[f"{words}-{n}" for n, (_, words) in enumerate(BAD)])
def test_arguments_that_would_leave_their_arrays_are_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    pair = Pair("eagle", tmp_path, target, wide=True)
    engine = pair.engine()
    assert isinstance(engine, EagleEngine)
    sound = NativeDraft(
        Sampling(), 3, 8, 3, 2, TokenTree.bare(), [5, 6], np.ones((2, HIDDEN_SIZE), np.float32), 1.0, [3, 4, 9]
    )
    assert pair.native.draft([sound], engine.cache)[0].tree.num_nodes == 8
    pair.native.draft([replace(sound, max_nodes=2)], engine.cache)
    with pytest.raises(EngineError, match=words):
        pair.native.draft([sound, replace(sound, **changes)], engine.cache)


def test_what_native_code_lacks_is_left_to_torch(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_head("eagle", tmp_path)
    assert unsupported_head(load("eagle", folder, target, torch.float64)) == "torch.float64 on cpu"
    caplog.set_level("INFO")
    config = ServingConfig(target=str(target), eagle=str(folder), dtype="float32", kv_memory_mb=16)
    _, engine = build_heads.load_engine("eagle", config)
    assert engine.native is None
    assert "heads of 8 numbers" in caplog.text
