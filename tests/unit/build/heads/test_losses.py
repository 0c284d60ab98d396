"""Losses and teacher forcing: each depth learns its own shift, and a head attends as it does when served."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from build.heads.losses import _drafting_loss, backward_by_depth, cross_entropy_to, feature_loss
from build.heads.make import make_heads
from build.heads.settings import Part
from build.heads.target import Batch, FrozenTarget
from build.heads.teacher_forcing import all_rows, draft_logits, sampled_rows
from runtime.models.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.models.heads.modules.medusa import MedusaHeads
from runtime.models.heads.modules.redrafter import RedrafterHead
from tests.support.heads_training import CPU, SIZES, STREAM, TINY


class Held:
    """A tensor that a graph holds for its backward pass, counted as long as it is held."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.numel()
        Held.now += self.size
        Held.most = max(Held.most, Held.now)

    def __del__(self) -> None:
        Held.now -= self.size


def test_medusa_s_heads_learn_the_same_one_by_one_and_hold_one_head_s_logits(target: FrozenTarget) -> None:
    settings = replace(TINY, kinds=("medusa",), parts={"medusa": Part(1e-3, depth=4, text=0.3)})
    settings = replace(settings, sizes=replace(SIZES, medusa_heads=4))
    batch = target.read(torch.from_numpy(STREAM[:330].astype(np.int64)).view(10, 33))
    roots = all_rows(batch.num_rows, 4, CPU)
    gradients, peaks, losses = [], [], []
    for backward in (
        lambda head: _drafting_loss(head, batch, settings.part("medusa"), roots),
        lambda head: backward_by_depth(head, batch, settings.part("medusa"), roots),
    ):
        head = make_heads(target, settings, STREAM)["medusa"]
        Held.now = Held.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            loss = backward(head)
            if loss.requires_grad:
                loss.backward()
        losses.append(float(loss.detach()))
        peaks.append(Held.most)
        gradients.append([parameter.grad for parameter in head.parameters()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole)
    assert peaks[1] < 0.35 * peaks[0], peaks


# Shifts: the state of row i spells token i + 1 + k, tokens are random, so that depth k alone can know its own.

VOCAB, WIDTH, ROWS, DEPTH = 12, 16, 40, 4
SMALL = LlamaConfig(
    hidden_size=WIDTH, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=VOCAB
)


def spelling_batch(seed: int, k: int, p_shift: int = 0) -> Batch:
    numbers = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (8, ROWS + DEPTH + 3), generator=numbers)
    spelt = nn.functional.one_hot(text, WIDTH).float() * 3
    last = spelt[:, 1 + k : 1 + k + ROWS]
    p = nn.functional.one_hot(text[:, 1 + p_shift : 1 + p_shift + ROWS], VOCAB).float()
    return Batch(text[:, : ROWS + 1], last, last.repeat(1, 1, 3), p)


def new_head(kind: str) -> nn.Module:
    torch.manual_seed(1)
    table = torch.randn(VOCAB, WIDTH)
    if kind == "medusa":
        return MedusaHeads(DEPTH, 1, table)
    if kind == "redrafter":
        return RedrafterHead(table, 1, 2 * WIDTH)
    return EagleHead(SMALL, table, table) if kind == "eagle" else Eagle3Head(SMALL, table, VOCAB)


def losses_by_depth(head: nn.Module, batch: Batch) -> list[Tensor]:
    roots = all_rows(ROWS, DEPTH, CPU)
    logits = draft_logits(head, batch, roots, DEPTH)
    return [cross_entropy_to(roots.take(batch.p, depth), logit) for depth, logit in enumerate(logits, start=1)]


def learned_depths(kind: str, k: int, p_shift: int = 0) -> set[int]:
    head = new_head(kind)
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-2)
    for seed in range(80):
        optimizer.zero_grad()
        sum(losses_by_depth(head, spelling_batch(seed, k, p_shift))).backward()
        optimizer.step()
    with torch.no_grad():
        losses = losses_by_depth(head, spelling_batch(999, k, p_shift))
    return {depth for depth, loss in enumerate(losses, start=1) if loss < 0.5 * np.log(VOCAB)}


@pytest.mark.parametrize("kind", ["medusa", "redrafter"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_depth_learns_its_own_shift_and_no_other(kind: str, k: int):
    assert learned_depths(kind, k) == {k}


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_depth_of_an_eagle_head_learns_its_own_shift_and_none_beyond(kind: str, k: int):
    """Depths before k may find theirs in the entries before."""
    assert max(learned_depths(kind, k), default=0) == k


def test_feature_loss_asks_for_the_next_feature_and_the_token_after_the_root():
    batch, head = spelling_batch(0, 1), new_head("eagle")
    roots = all_rows(ROWS, 1, CPU)
    guessed = batch.last[:, 1:]  # a head that is always right
    head.forward = lambda *given: guessed  # type: ignore[method-assign]
    settings = replace(TINY, token_weight=0.0)
    assert feature_loss(head, batch, settings, torch.rand(batch.last.shape)) == 0
    settings = replace(TINY, feature_weight=0.0, token_weight=1.0)
    expected = cross_entropy_to(roots.take(batch.p, 1), head.logits(guessed))
    assert feature_loss(head, batch, settings, torch.rand(batch.last.shape)) == expected


# The attention of a teacher-forced head is that of a served one.


def served(head: EagleHead | Eagle3Head, batch: Batch, row: int, place: int, depth: int) -> list[Tensor]:
    """Logits of each depth, from `place` of one window: entries one by one, each beside the keys cached before it."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(key[0, :, 0])
        values.append(value[0, :, 0])
        output = torch.zeros_like(query[:, :, 0])  # (1, H, e)
        group = query.shape[1] // key.shape[1]
        for number in range(query.shape[1]):
            own = [seen[number // group] for seen in keys]
            weights = torch.stack([query[0, number, 0] @ seen / query.shape[-1] ** 0.5 for seen in own]).softmax(-1)
            output[0, number] = sum(w * seen[number // group] for w, seen in zip(weights, values, strict=True))
        return output[:, None]

    features = batch.layers if isinstance(head, Eagle3Head) else batch.last
    states = list(head.fuse(features[row, : place + 1]))
    logits = []
    for position in range(place + depth):
        token = batch.tokens[row, position + 1].view(1, 1)
        state = head(states[position][None, None], token, torch.tensor([[position]]), attend)[0, 0]
        if position >= place:
            states.append(state)
            logits.append(head.logits(state))
    return logits


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_teacher_forced_head_has_the_logits_that_it_has_when_served_step_by_step(kind: str, share: float):
    head, batch = new_head(kind).double(), spelling_batch(5, 1)
    batch = batch._replace(last=torch.randn_like(batch.last).double(), layers=torch.randn_like(batch.layers).double())
    roots = sampled_rows(ROWS, DEPTH, share, torch.Generator().manual_seed(0), CPU)
    with torch.no_grad():
        drafted = torch.stack(list(draft_logits(head, batch, roots, DEPTH)))  # (depth, B, m, V)
        for row, number in product((0, 3), (0, len(roots.rows) // 2, len(roots.rows) - 1)):
            expected = torch.stack(served(head, batch, row, int(roots.rows[number]), DEPTH))
            torch.testing.assert_close(drafted[:, row, number], expected)
