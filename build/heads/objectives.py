"""What each head is to minimise on a batch, in nats; it does not know optimizers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from build.heads.places import Places, all_places, drawn_places
from build.heads.settings import ABLATED, Part, Settings
from build.heads.target import Batch
from build.heads.unroll import unroll
from runtime.heads.modules.eagle import EagleHead
from runtime.heads.modules.layers import attend_causally


def divergence(logits: Tensor, p: Tensor) -> Tensor:
    """Mean cross-entropy of q = softmax(logits) against p, both (B, m, V); p's own entropy is in it.

    Where p is only a part of a distribution (a draft vocabulary), what it lacks counts nothing.
    """
    logits = logits.float()
    mass = p.sum(-1)
    return (mass * logits.logsumexp(-1) - (p * logits).sum(-1)).mean()


class Drawn(NamedTuple):
    """What is random in a head's loss. noise: (B, n, d) of uniform numbers in 0 … 1, empty where none is needed."""

    places: Places
    noise: Tensor


def draw(name: str, batch: Batch, settings: Settings, generator: torch.Generator) -> Drawn:
    """The random part of the module `name`'s loss, a function of the generator's state alone."""
    part, device = settings.part(name), batch.last.device
    places = drawn_places(batch.num_rows, part.depth, part.share, generator, device)
    shape = batch.last.shape if name in ("eagle", ABLATED) else (0,)
    return Drawn(places, torch.rand(shape, generator=generator).to(device))


def drafting_loss(head: nn.Module, batch: Batch, part: Part, places: Places) -> Tensor:
    """Divergence from the target (and from the text, by `part.text`) at each depth, weighted by decay^(depth − 1)."""
    ids = getattr(head, "ids", None)
    p = batch.p if ids is None else batch.p[..., ids]
    total = batch.last.new_zeros(())
    for depth, logits in enumerate(unroll(head, batch, places, part.depth), start=1):
        loss = divergence(logits, places.take(p, depth))
        if part.text:
            labels = places.take(batch.tokens, depth + 1)
            loss = torch.lerp(loss, functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), part.text)
        total = total + part.decay ** (depth - 1) * loss
    return total


def feature_loss(head: EagleHead, batch: Batch, settings: Settings, noise: Tensor) -> Tensor:
    """EAGLE-1: smooth-L1 to the next feature + weighted divergence by the target's LM head (arXiv:2401.15077, 3.2).

    Its features carry uniform noise, narrower in longer windows, as the authors' code has it.
    """
    width = settings.noise * min(1.0, 512 / batch.num_rows)
    features = batch.last + (noise - 0.5) * (2 * width)
    places = all_places(batch.num_rows, 1, batch.last.device)
    positions = places.rows[None].expand(len(batch.last), -1)
    tokens = places.take(batch.tokens, 1)
    guessed = head(places.take(features), tokens, positions, attend_causally)
    regression = functional.smooth_l1_loss(guessed.float(), places.take(batch.last, 1))
    return settings.feature_weight * regression + settings.token_weight * divergence(
        head.logits(guessed), places.take(batch.p, 1)
    )


def loss_of(name: str, head: nn.Module, batch: Batch, settings: Settings, drawn: Drawn) -> Tensor:
    """The loss of the module `name`."""
    if isinstance(head, EagleHead):
        return feature_loss(head, batch, settings, drawn.noise)
    return drafting_loss(head, batch, settings.part(name), drawn.places)
