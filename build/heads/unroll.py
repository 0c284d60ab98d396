"""Each head drafting along the text: at depth j (from 1) its logits of the token j places after the root.

Row i's root is token i + 1, so depth j stands for token i + 1 + j, whose target's distribution is p[i + j]. The text's
own tokens are fed in between, since a draft counts only as long as it is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from build.heads.places import DraftedKeys, Places
from build.heads.target import Batch
from runtime.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.heads.modules.medusa import MedusaHeads
from runtime.heads.modules.redrafter import RedrafterHead


def unroll(head: nn.Module, batch: Batch, places: Places, depth: int) -> Iterator[Tensor]:
    """Yield logits (B, m, V or V_d) for depth 1 … `depth`; Medusa's end at its last head."""
    if isinstance(head, MedusaHeads):
        return islice(medusa(head, batch, places), depth)
    if isinstance(head, RedrafterHead):
        return islice(recurrent(head, batch, places), depth)
    if isinstance(head, EagleHead | Eagle3Head):
        return islice(extrapolated(head, batch, places), depth)
    raise TypeError(f"no such head: {type(head).__name__}")


def medusa(heads: MedusaHeads, batch: Batch, places: Places) -> Iterator[Tensor]:
    """Head k from the same state (arXiv:2401.10774, section 2.1)."""
    state = places.take(batch.last)
    for head in heads:
        yield head(state)


def recurrent(head: RedrafterHead, batch: Batch, places: Places) -> Iterator[Tensor]:
    """s_j from the token before it; h stays (arXiv:2403.09919, section 3.1)."""
    target_state = places.take(batch.last)
    state = torch.zeros_like(target_state)
    for offset in range(1, batch.num_rows):
        state = head.advance(state, places.take(batch.tokens, offset))
        yield head.logits(target_state, state)


def extrapolated(head: EagleHead | Eagle3Head, batch: Batch, places: Places) -> Iterator[Tensor]:
    """True entries first, then the head's own output fed back (arXiv:2503.01840, section 3.2)."""
    attend = DraftedKeys(places)
    features = batch.layers if isinstance(head, Eagle3Head) else batch.last
    positions = torch.arange(batch.num_rows, device=features.device)[None].expand(len(features), -1)
    state = head(head.fuse(features), batch.tokens[:, 1:], positions, attend)
    state = places.take(state)
    for offset in range(1, batch.num_rows):
        yield head.logits(state)
        state = head(state, places.take(batch.tokens, 1 + offset), places.take(positions) + offset, attend)
