"""What a drafting head is told beside the context, as flat tensors (docs/protocol.md, Drafter wire)."""

from __future__ import annotations

import numpy as np

from orchestrator.core.errors import EngineError
from orchestrator.core.static_trees import MAX_WIDTH
from orchestrator.core.tree import MAX_NODES, TokenTree
from orchestrator.core.types import HeadInput
from orchestrator.sampling.sampled_drafts import MAX_CANDIDATES
from orchestrator.wire.tensors import Incoming, Tensors, bounded, ids, pack_ids, scalar

NO_HEAD_INPUT = HeadInput()
#: Most rows of hidden states that cross at once.
MAX_FEATURE_ROWS = 512


def pack_head_input(head: HeadInput) -> Tensors:
    """Pack it; what is empty is omitted."""
    tensors = pack_ids("choice_ranks", head.choices.tokens) | pack_ids("choice_parents", head.choices.parents)
    tensors |= pack_ids("width", [head.width] if head.width else [])
    if head.features is None or not len(head.features):
        return tensors
    return tensors | {"features": head.features, "features_start": np.array([head.features_start], np.int32)}


def unpack_head_input(tensors: Incoming) -> HeadInput:
    """Unpack and check it; raises EngineError when a tensor breaks a law."""
    ranks, parents = ids(tensors, "choice_ranks"), ids(tensors, "choice_parents")
    choices = TokenTree.checked(ranks, parents, MAX_CANDIDATES, MAX_NODES)
    features = tensors.get("features")
    if features is not None and (features.ndim != 2 or features.dtype != np.float32):
        raise EngineError(f"features must be (rows, width) float32, got {features.shape} {features.dtype}")
    if features is not None and len(features) > MAX_FEATURE_ROWS:
        raise EngineError(f"features must have at most {MAX_FEATURE_ROWS} rows, got {len(features)}")
    return HeadInput(features, scalar(tensors, "features_start", 0), choices, bounded(tensors, "width", MAX_WIDTH, 0))
