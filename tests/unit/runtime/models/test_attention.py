"""Attention of a pass equals that of each token over the slots that it sees, whatever shares its group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from runtime.engine.kv import batch, groups
from runtime.engine.kv.batch import Pass, Segment
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.cache import CacheShape, KVCache
from runtime.engine.kv.groups import grouped
from runtime.engine.kv.sequences import SequenceTable
from runtime.engine.target import TargetEngine
from runtime.models.attention import paged_tree_attention
from tests.support.launches import Requests, count, small_engine

RNG = np.random.default_rng(3)
HEADS, KV_HEADS, HEAD_DIM, BLOCK, WINDOW, SCALING = 6, 2, 8, 4, 7, 0.4
CPU = torch.device("cpu")

# Per segment: tokens before it in the cache, its context tokens, its nodes.
MIXES: dict[str, list[tuple[int, int, int]]] = {
    "one plain step": [(20, 1, 0)],
    "plain steps": [(20, 1, 0), (3, 1, 0), (37, 1, 0), (20, 1, 0)],
    "equal trees": [(20, 1, 6)] * 3,
    "trees of very different sizes": [(30, 1, 1), (31, 1, 150), (29, 1, 9), (5, 1, 60), (30, 1, 0), (90, 2, 33)],
    "a long prompt beside small steps": [(12, 1, 3), (0, 300, 0), (14, 1, 0), (9, 1, 8)],
    "a long prompt beside a step of its length": [(0, 300, 0), (299, 1, 0)],
    "parts of prompts": [(0, 100, 5), (64, 90, 0), (3, 2, 0), (128, 70, 0), (0, 1, 4), (0, 1, 0)],
}


@pytest.fixture(params=[True, False], ids=["joined", "alone"])
def joins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(batch, "joins", lambda device: request.param)
    return bool(request.param)


class Setup:
    """A cache that holds NaN wherever nothing was written, and a pass whose segments every other time are scattered."""

    def __init__(self, mix: list[tuple[int, int, int]]) -> None:
        self.cache = KVCache(CacheShape(1, KV_HEADS, HEAD_DIM), 1, BLOCK, torch.float64, CPU)
        self.cache.kv.fill_(torch.nan)
        self._table = SequenceTable(BlockPool(self.cache.num_blocks, BLOCK), 10_000, share=False)
        self.segments = [self._segment(1 + index, *sizes) for index, sizes in enumerate(mix)]
        num_tokens = sum(segment.num_tokens for segment in self.segments)
        self.query, self.key, self.value = (
            torch.randn(1, heads, num_tokens, HEAD_DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

    def attend(self, **options: object) -> Tensor:
        """Return the outputs, (N, H, d)."""
        module = SimpleNamespace(layer_idx=0)
        tokens = Pass(self.segments, CPU, torch.float64)
        inputs = self.query, self.key, self.value, None
        found = paged_tree_attention(module, *inputs, scaling=SCALING, batch=tokens, cache=self.cache, **options)  # type: ignore[arg-type]
        return found[0][0]

    def _segment(self, sequence_id: int, cached: int, fresh: int, nodes: int) -> Segment:
        parents = np.array([RNG.integers(max(node - 3, 0), node + 1) for node in range(nodes)], np.int32)
        tree = TokenTree(RNG.permutation(1000)[:nodes].astype(np.int32), parents)
        sequence = self._table.open(delta_of(Context([1] * (cached + fresh)), 0, sequence_id, ""), nodes, 200)
        if sequence_id % 2 == 0:
            sequence.blocks.reverse()
        for index in range(cached):
            self.cache.kv[0, :, :, sequence.slot(index)] = torch.randn(2, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        return Segment(sequence, cached, cached + fresh, tree)


def seen_by(segment: Segment, token: int, window: int | None) -> list[int]:
    """Indices in the sequence of what a token of the segment sees: the context before it, its ancestors and itself."""
    node = token - segment.num_context + 1
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = int(segment.tree.parents[node - 1])
    seen = [*range(segment.last if path else segment.first + token + 1), *(segment.last + each - 1 for each in path)]
    return seen[-window:] if window else seen


def reference(setup: Setup, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Attention token by token and head by head; (N, H, d)."""
    rows = []
    for segment in setup.segments:
        for token in range(segment.num_tokens):
            slots = [segment.sequence.slot(index) for index in seen_by(segment, token, window)]
            keys, values = setup.cache.kv[0, :, :, slots].repeat_interleave(HEADS // KV_HEADS, dim=1)
            scores = (keys @ setup.query[0, :, len(rows), :, None])[..., 0] * SCALING
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            weights = scores.exp()
            total = weights.sum(dim=1) + (0 if sinks is None else sinks.exp())
            rows.append((weights[:, None] @ values)[:, 0] / total[:, None])
    return torch.stack(rows)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_every_token_attends_to_what_it_sees(
    joins: bool, mix: str, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    setup = Setup(MIXES[mix])
    sinks = torch.randn(HEADS, dtype=torch.float64) if has_sinks else None
    found = setup.attend(sliding_window=window, softcap=softcap, s_aux=sinks)
    assert (found - reference(setup, window, softcap, sinks)).abs().max() <= 1e-12


def test_steps_of_like_size_are_one_group_as_far_as_its_memory_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    for mix in ("plain steps", "equal trees"):
        assert len(grouped(Setup(MIXES[mix]).segments)) == 1
    monkeypatch.setattr(groups, "MAX_GROUP_SLOTS", 60)  # of the trees' 27 slots each
    assert list(map(len, grouped(Setup(MIXES["equal trees"]).segments))) == [2, 1]


@pytest.fixture(scope="module")
def engine() -> Iterator[TargetEngine]:
    with small_engine() as made:
        yield made


@pytest.mark.parametrize("tree_of", [lambda requests, n: requests.trees(), lambda requests, n: [TokenTree.bare()] * n])
def test_a_pass_launches_as_much_whatever_the_number_of_requests(
    engine: TargetEngine, tree_of: Callable[[Requests, int], list[TokenTree]]
) -> None:
    found = []
    for number in (2, 5, 12):
        requests = Requests(engine, number, Sampling())
        trees = tree_of(requests, number)
        requests.step(trees)
        found.append(count(lambda requests=requests, trees=trees: requests.step(trees)))  # type: ignore[misc]
    assert all(fewer == more for fewer, more in pairwise(found))
