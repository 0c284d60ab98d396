"""The distributions q that drafters sample from, each over the most probable tokens of its row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestrator.core.sampled_drafts import MAX_CANDIDATES, draft_distribution
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.types import Distribution
from runtime.engine.sampling import served
from runtime.engine.staging import fetch


def candidates(logits: Tensor, samplings: Sequence[Sampling], ids: Tensor | None = None) -> list[Distribution]:
    """Return q of every row, over its MAX_CANDIDATES most probable tokens.

    logits: (n, V). samplings: (n,), of each row's request. ids: (V,) int64, the token of each column; None: 0 … V − 1.
    """
    log_q = served.log_p(logits, samplings)
    top = log_q.topk(min(MAX_CANDIDATES, log_q.shape[-1]), dim=-1)
    tokens = top.indices if ids is None else ids[top.indices]
    ascending, order = tokens.sort(dim=-1)
    probs = top.values.gather(-1, order).exp()
    return [draft_distribution(*row) for row in zip(*fetch([ascending.int(), probs]), strict=True)]
