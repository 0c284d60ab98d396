"""The target's hidden states as a tensor; the target's answer and a drafter's call have them."""

from __future__ import annotations

import numpy as np

from orchestrator.core.errors import EngineError
from orchestrator.core.types import MAX_FEATURE_ROWS, Features
from orchestrator.wire.tensors import Incoming


def unpack_features(tensors: Incoming) -> Features | None:
    """Return (rows, width) float32, or None if they were omitted; raise EngineError for another shape or dtype."""
    features = tensors.get("features")
    if features is not None and (features.ndim != 2 or features.dtype != np.float32):
        raise EngineError(f"features must be (rows, width) float32, got {features.shape} {features.dtype}")
    if features is not None and len(features) > MAX_FEATURE_ROWS:
        raise EngineError(f"features must have at most {MAX_FEATURE_ROWS} rows, got {len(features)}")
    return features
