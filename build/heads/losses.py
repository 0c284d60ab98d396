"""The loss of each head on a batch, in nats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from build.heads.settings import ABLATED, Part, Settings
from build.heads.target import Batch
from build.heads.teacher_forcing import RootRows, all_rows, draft_logits, sampled_rows
from build.parallel import Workers
from runtime.models.heads.modules.eagle import EagleHead
from runtime.models.heads.modules.layers import attend_causally
from runtime.models.heads.modules.medusa import MedusaHeads

ALONE = Workers()


def cross_entropy_to(p: Tensor, logits: Tensor) -> Tensor:
    """Return the mean cross-entropy of q = softmax(logits) to p, which includes p's own entropy.

    p, logits: (B, m, V). p may be part of a distribution (a draft vocabulary); the missing part does not count.
    """
    logits = logits.float()
    mass = p.sum(-1)
    return (mass * logits.logsumexp(-1) - (p * logits).sum(-1)).mean()


class RandomInputs(NamedTuple):
    """What is random in a head's loss. noise: (B, n, d), uniform in 0 … 1; empty for a head without noise."""

    roots: RootRows
    noise: Tensor


def sample_inputs(
    name: str, batch: Batch, settings: Settings, generator: torch.Generator, workers: Workers = ALONE
) -> RandomInputs:
    """Return the random inputs to the loss of the module `name`, a function of the generator's state alone.

    workers: the processes that share the whole batch; each row gets the noise that it would get in one process.
    """
    part, device = settings.part(name), batch.last.device
    roots = sampled_rows(batch.num_rows, part.depth, part.share, generator, device)
    if name not in ("eagle", ABLATED):
        return RandomInputs(roots, torch.empty(0, device=device))
    num_rows = workers.size * len(batch.last)  # as many as the batch has, or a few more
    noise = workers.share(torch.rand((num_rows, *batch.last.shape[1:]), generator=generator))
    return RandomInputs(roots, noise[: len(batch.last)].to(device))


def loss_of(name: str, head: nn.Module, batch: Batch, settings: Settings, inputs: RandomInputs) -> Tensor:
    """Return the loss of the module `name`."""
    if isinstance(head, EagleHead):
        return feature_loss(head, batch, settings, inputs.noise)
    return _drafting_loss(head, batch, settings.part(name), inputs.roots)


def _drafting_loss(head: nn.Module, batch: Batch, part: Part, roots: RootRows) -> Tensor:
    """Return the sum of the losses at all depths."""
    total = batch.last.new_zeros(())
    for loss in losses_by_depth(head, batch, part, roots):
        total = total + loss
    return total


def losses_by_depth(head: nn.Module, batch: Batch, part: Part, roots: RootRows) -> Iterator[Tensor]:
    """Yield the cross-entropy to the target (and to the text, by `part.text`), weighted by decay^(depth − 1)."""
    ids = getattr(head, "ids", None)
    p = batch.p if ids is None else batch.p[..., ids]
    for depth, logits in enumerate(draft_logits(head, batch, roots, part.depth), start=1):
        loss = cross_entropy_to(roots.take(p, depth), logits)
        if part.text:
            labels = roots.take(batch.tokens, depth + 1)
            loss = torch.lerp(loss, functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), part.text)
        yield part.decay ** (depth - 1) * loss


def backward_by_depth(heads: MedusaHeads, batch: Batch, part: Part, roots: RootRows) -> Tensor:
    """Add the gradients of Medusa's heads one after the other, and return the loss.

    The heads share no trained parameters, so these gradients add up to those of the whole loss, and only one head's
    logits and their gradients are held at a time, (B, m, V) each.
    """
    total = batch.last.new_zeros(())
    for loss in losses_by_depth(heads, batch, part, roots):
        loss.backward()
        total = total + loss.detach()
    return total


def feature_loss(head: EagleHead, batch: Batch, settings: Settings, noise: Tensor) -> Tensor:
    """EAGLE-1: smooth-L1 to the next feature + weighted cross-entropy by the target's LM head (arXiv:2401.15077, 3.2).

    noise: (B, n, d), uniform in 0 … 1, is added to the features; longer windows get less, as in the authors' code.
    """
    width = settings.noise * min(1.0, 512 / batch.num_rows)
    features = batch.last + (noise - 0.5) * (2 * width)
    roots = all_rows(batch.num_rows, 1, batch.last.device)
    positions = roots.rows[None].expand(len(batch.last), -1)
    predicted = head(roots.take(features), roots.take(batch.tokens, 1), positions, attend_causally)
    regression = functional.smooth_l1_loss(predicted.float(), roots.take(batch.last, 1))
    return settings.feature_weight * regression + settings.token_weight * cross_entropy_to(
        roots.take(batch.p, 1), head.logits(predicted)
    )
