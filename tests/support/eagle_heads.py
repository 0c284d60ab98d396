"""A random EAGLE head with its engine, and the oracle of what it says after a path; random contexts for heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from orchestrator.core.static_trees import tree_of_choices
from runtime.models.heads.engines.eagle import EagleEngine
from tests.support import heads_oracle as oracle
from tests.support.choice_trees import published_choices
from tests.support.heads import (
    HIDDEN_SIZE,
    load,
    make_head,
    native_or_skip,
    paths_of,
    tables,
)
from tests.support.tiny_models import VOCAB_SIZE

Path_ = tuple[int, ...]
EAGLE_TREE = tree_of_choices(published_choices("eagle1_25"))


class Eagle:
    """An engine over a random EAGLE head, and the oracle of what it says after a path.

    native: the engine runs native code in float32, not torch in float64.
    """

    def __init__(self, kind: str, folder: Path, target: Path, native: bool = False, **options: Any) -> None:
        self.kind = kind
        make_head(kind, folder, wide=native, **options)
        self.head = load(kind, folder, target, torch.float32 if native else torch.float64)
        self.native = native_or_skip(self.head) if native else None
        self.engine = self.new_engine()
        self.tensors, self.config = oracle.read_tensors(folder), oracle.read_config(folder)
        self.embedding, self.lm_head = tables(target)
        self.width = HIDDEN_SIZE * (3 if kind == "eagle3" else 1)

    def new_engine(self, block_tokens: int = 4) -> EagleEngine:
        return EagleEngine(self.head, memory_mb=1, block_tokens=block_tokens, native=self.native)

    def log_q(
        self, ids: list[int], features: np.ndarray, path: Path_, positions: list[int] | None = None
    ) -> np.ndarray:
        """Return (V,) log q after ids and path; features of `positions`, all by default."""
        kept = positions if positions is not None else list(range(len(ids) - 1))
        rows, tokens = features[kept].astype(np.float32).astype(np.float64), [ids[i + 1] for i in kept]
        if self.kind == "eagle":
            logits = oracle.eagle_logits(
                self.tensors, self.config, self.embedding, self.lm_head, rows, tokens, path, kept
            )
        else:
            logits = oracle.eagle3_logits(self.tensors, self.config, self.embedding, rows, tokens, path, kept)
            logits = oracle.over_target(self.tensors, logits, VOCAB_SIZE)
        return oracle.log_softmax(logits[-1])


def random_context(length: int, width: int, seed: int = 0) -> tuple[list[int], np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(1, VOCAB_SIZE, length).tolist(), rng.normal(0, 1, (length - 1, width))


def same_dynamic(drafted: Any, expected: list[tuple[Path_, float]]) -> bool:
    return paths_of(drafted) == [path for path, _ in expected]
