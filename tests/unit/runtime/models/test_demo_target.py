"""The shipped target in float32, the dtype that the demo serves: tree rows against plain causal forward passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.stock_model import StockModel
from runtime.engine.paged import PagedModel
from tests.support.engines import make_paged, node_paths
from tests.unit.runtime.engine.test_engine import open_segment, random_tree

TARGET = Path(__file__).resolve().parents[4] / "models/target"
LAW = 1e-4
RNG = np.random.default_rng(5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def random_batch(paged: PagedModel) -> list:
    """Three requests with contexts of different lengths and trees of different sizes."""
    lengths, sizes = (7, 60, 150), (0, 9, 24)
    return [
        open_segment(paged, i + 1, RNG.integers(1, paged.model.vocab_size, length).tolist(), random_tree(nodes))
        for i, (length, nodes) in enumerate(zip(lengths, sizes, strict=True))
    ]


def test_tree_rows_of_the_demo_target_are_within_float32_of_plain_forward() -> None:
    paged, plain = make_paged(TARGET, "float32", block_tokens=16, memory_mb=32), StockModel(TARGET, "float32")
    segments = random_batch(paged)
    logits = paged.forward(segments).double().numpy()
    paths = [path for s in segments for path in node_paths(s.sequence.ids[: s.last], s.tree)]
    worst = max(
        float(np.abs(log_softmax(row) - log_softmax(plain.logits(path))).max())
        for row, path in zip(logits, paths, strict=True)
    )
    assert worst <= LAW
