"""Heads that draft along a text: at depth j (from 1) the logits of the token j places after a root.

Row i of a window stands for the prefix 0 … i. Its root is token i + 1, so depth j predicts token i + 1 + j, whose
distribution by the target is p[i + j]. The text's own tokens are fed in between, since a draft counts only as long as
it is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from build.heads.target import Batch
from runtime.models.heads.modules.eagle import Eagle3Head, EagleHead
from runtime.models.heads.modules.layers import attend_causally
from runtime.models.heads.modules.medusa import MedusaHeads
from runtime.models.heads.modules.redrafter import RedrafterHead


class RootRows(NamedTuple):
    """The rows of a window from which heads draft, in ascending order.

    rows: (m,) int64. contiguous: the rows are 0 … m − 1.
    """

    rows: Tensor
    contiguous: bool

    def take(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return the rows `offset` places after these, (B, n, …) → (B, m, …); a view if they are contiguous."""
        if self.contiguous:
            return x[:, offset : offset + len(self.rows)]
        return x.index_select(1, self.rows + offset)


def all_rows(num_rows: int, depth: int, device: torch.device) -> RootRows:
    """Return every row that has `depth` rows after it."""
    return RootRows(torch.arange(num_rows - depth, device=device), contiguous=True)


def sampled_rows(num_rows: int, depth: int, share: float, generator: torch.Generator, device: torch.device) -> RootRows:
    """Return a random share of `all_rows`, a function of the generator's state alone."""
    if share >= 1:
        return all_rows(num_rows, depth, device)
    available = num_rows - depth
    rows = torch.randperm(available, generator=generator)[: max(1, round(share * available))]
    return RootRows(rows.sort().values.to(device), contiguous=False)


def draft_logits(head: nn.Module, batch: Batch, roots: RootRows, depth: int) -> Iterator[Tensor]:
    """Yield the logits (B, m, V or V_d) of depth 1 … `depth`; Medusa has no more depths than heads."""
    if isinstance(head, MedusaHeads):
        return islice(_medusa(head, batch, roots), depth)
    if isinstance(head, RedrafterHead):
        return islice(_redrafter(head, batch, roots), depth)
    if isinstance(head, EagleHead | Eagle3Head):
        return islice(_eagle(head, batch, roots), depth)
    raise TypeError(f"not a drafting head: {type(head).__name__}")


def _medusa(heads: MedusaHeads, batch: Batch, roots: RootRows) -> Iterator[Tensor]:
    """Every head reads the same state (arXiv:2401.10774, section 2.1)."""
    state = roots.take(batch.last)
    for head in heads:
        yield head(state)


def _redrafter(head: RedrafterHead, batch: Batch, roots: RootRows) -> Iterator[Tensor]:
    """The recurrent state reads one more token at each depth; h stays the same (arXiv:2403.09919, section 3.1)."""
    target_state = roots.take(batch.last)
    state = torch.zeros_like(target_state)
    for offset in range(1, batch.num_rows):
        state = head.advance(state, roots.take(batch.tokens, offset))
        yield head.logits(target_state, state)


def _eagle(head: EagleHead | Eagle3Head, batch: Batch, roots: RootRows) -> Iterator[Tensor]:
    """Depth 1 reads the target's features, further depths the head's own output (arXiv:2503.01840, section 3.2)."""
    attend = _DraftAttention(roots)
    features = batch.layers if isinstance(head, Eagle3Head) else batch.last
    positions = torch.arange(batch.num_rows, device=features.device)[None].expand(len(features), -1)
    state = roots.take(head(head.fuse(features), batch.tokens[:, 1:], positions, attend))
    for offset in range(1, batch.num_rows):
        yield head.logits(state)
        state = head(state, roots.take(batch.tokens, 1 + offset), roots.take(positions) + offset, attend)


@dataclass
class _DraftAttention:
    """Attention of an EAGLE head that drafts from `roots` (EAGLE-3's training-time test, arXiv:2503.01840, 3.2).

    The first call is for the context's rows, which attend to each other causally. Each later call is for one drafted
    row per root: it attends to the context's rows up to its root and to the rows drafted from that root, itself
    included.
    """

    roots: RootRows
    context: tuple[Tensor, Tensor] | None = None
    drafted: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; query: (B, H, m, e); key, value: (B, H_kv, m, e) → (B, m, H, e)."""
        groups = query.shape[1] // key.shape[1]
        pair = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if self.context is None:
            self.context = pair
            return attend_causally(module, query, *pair)
        self.drafted.append(pair)
        keys, values = self.context
        weights = self._weights(query, keys)
        num_rows = keys.shape[2]
        output = weights[..., :num_rows] @ values
        for weight, (_, drafted) in zip(weights[..., num_rows:].split(1, -1), self.drafted, strict=True):
            output = output + weight * drafted
        return output.transpose(1, 2)

    def _weights(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return attention weights (B, H, m, n + drafted), which sum to 1 in each row; keys: (B, H, n, e)."""
        scores = query @ keys.transpose(-1, -2)  # (B, H, m, n)
        later = torch.arange(keys.shape[2], device=keys.device) > self.roots.rows[:, None]
        own = [(query * key).sum(-1, keepdim=True) for key, _ in self.drafted]
        scores = torch.cat([scores.masked_fill(later, -torch.inf), *own], dim=-1)
        return (scores.float() * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
