"""From where heads are unrolled, and what they may see there; it does not know heads or losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime.heads.modules.layers import attend_causally


class Places(NamedTuple):
    """Rows of a window, sorted. rows: (m,) int64; whole: they are 0 … m − 1."""

    rows: Tensor
    whole: bool

    def take(self, x: Tensor, offset: int = 0) -> Tensor:
        """x: (B, n, …) → (B, m, …), `offset` places later; a view where that can be."""
        if self.whole:
            return x[:, offset : offset + len(self.rows)]
        return x.index_select(1, self.rows + offset)


def all_places(num_rows: int, depth: int, device: torch.device) -> Places:
    """Every row that has a row `depth` places after it."""
    return Places(torch.arange(num_rows - depth, device=device), whole=True)


def drawn_places(num_rows: int, depth: int, share: float, generator: torch.Generator, device: torch.device) -> Places:
    """A random share of `all_places`, a function of the generator's state alone."""
    available = num_rows - depth
    if share >= 1:
        return all_places(num_rows, depth, device)
    rows = torch.randperm(available, generator=generator)[: max(1, round(share * available))]
    return Places(rows.sort().values.to(device), whole=False)


@dataclass
class DraftedKeys:
    """Attention while a head is unrolled from `places` (EAGLE-3's training-time test, arXiv:2503.01840, section 3.2).

    The first call is of the true entries, which see each other causally. Each later one is of one drafted entry per
    place: it sees the true entries up to its place and the entries drafted from that place, itself the last.
    """

    places: Places
    true: tuple[Tensor, Tensor] | None = None
    drafted: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: (B, H, m, e), key, value: (B, H_kv, m, e) → (B, m, H, e)."""
        groups = query.shape[1] // key.shape[1]
        if self.true is None:
            self.true = (key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
            return attend_causally(module, query, *self.true)
        self.drafted.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        weights = self._weights(query, self.true[0])
        num_true = self.true[0].shape[2]
        output = weights[..., :num_true] @ self.true[1]
        for weight, (_, drafted) in zip(weights[..., num_true:].split(1, -1), self.drafted, strict=True):
            output = output + weight * drafted
        return output.transpose(1, 2)

    def _weights(self, query: Tensor, true: Tensor) -> Tensor:
        """Return (B, H, m, n + drafted), each row's sum 1."""
        scores = query @ true.transpose(-1, -2)  # (B, H, m, n)
        later = torch.arange(true.shape[2], device=true.device) > self.places.rows[:, None]
        own = [(query * key).sum(-1, keepdim=True) for key, _ in self.drafted]
        scores = torch.cat([scores.masked_fill(later, -torch.inf), *own], dim=-1)
        return (scores.float() * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
