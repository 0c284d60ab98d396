"""The training loss, the held-out loss by position, and the agreement of two models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from build.data import Tokens

# Position bands of the model card, in tokens of context: (first, one past the last).
BANDS = ((0, 128), (128, 512), (512, 1_024), (1_024, 2_048))

Loss = Callable[[torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean negative log-likelihood in nats of labels (B, n) under logits (B, n, V)."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def text_loss(model: LlamaForCausalLM) -> Loss:
    """Return the loss of windows (B, n + 1) on the text alone."""

    def loss(windows: torch.Tensor) -> torch.Tensor:
        return cross_entropy(_logits(model, windows[:, :-1]), windows[:, 1:])

    return loss


def distillation_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM, weight: float) -> Loss:
    """Return the loss `weight` · KL(p || q) to the teacher's p + (1 − weight) · the loss on the text, in nats."""

    def loss(windows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            log_p = functional.log_softmax(_logits(teacher, windows[:, :-1]).float(), dim=-1)
        logits = _logits(model, windows[:, :-1])
        log_q = functional.log_softmax(logits.float(), dim=-1)
        # (B, n): mean over positions, so that both terms are nats per token.
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        return weight * divergence + (1 - weight) * cross_entropy(logits, windows[:, 1:])

    return loss


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean held-out loss in nats per token: over all positions, and per band of positions."""

    mean: float
    bands: dict[str, float]
    tokens: int


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, stream: Tokens, max_windows: int, length: int = 2_048) -> HeldOutLoss:
    """Return the loss over at most `max_windows` windows of `length` tokens, spread over `stream`."""
    model.eval()
    losses = [_position_losses(model, window) for window in spread_windows(stream, max_windows, length)]
    model.train()
    per_position = torch.stack(losses).mean(0)  # (length,)
    bands = {f"{first}-{last}": float(per_position[first:last].mean()) for first, last in BANDS if last <= length}
    return HeldOutLoss(float(per_position.mean()), bands, len(losses) * length)


@dataclass(frozen=True)
class Agreement:
    """How closely a draft's q follows the target's p.

    greedy: share of positions at which both have the same most likely token. overlap: mean of sum(min(p, q)).
    """

    greedy: float
    overlap: float


@torch.inference_mode()
def agreement(draft: LlamaForCausalLM, target: LlamaForCausalLM, stream: Tokens, max_windows: int) -> Agreement:
    """Return the agreement over windows of 2,048 tokens; the overlap is the acceptance rate at temperature 1."""
    greedy, overlap = [], []
    for window in spread_windows(stream, max_windows, 2_048):
        p = _logits(target, window[:, :-1]).float().softmax(-1)  # (1, n, V)
        q = _logits(draft, window[:, :-1]).float().softmax(-1)
        greedy.append(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
        overlap.append(float(torch.minimum(p, q).sum(-1).mean()))
    return Agreement(sum(greedy) / len(greedy), sum(overlap) / len(overlap))


def _logits(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, n, V) of ids (B, n), on the model's device."""
    logits: torch.Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
    return logits


def _position_losses(model: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """Return the loss in nats of each predicted token, (n,) float64; window: (1, n + 1)."""
    window = window.to(model.device)
    logits = _logits(model, window[:, :-1])
    return functional.cross_entropy(logits[0].float(), window[0, 1:], reduction="none").double()


def spread_windows(stream: Tokens, max_windows: int, length: int) -> Iterator[torch.Tensor]:
    """Yield windows (1, length + 1) at equal distances, so that a few of them cover many files."""
    available = (len(stream) - 1) // length
    count = min(max_windows, available)
    for number in range(count):
        start = (number * available // count) * length
        yield torch.from_numpy(stream[start : start + length + 1].astype("int64"))[None]
