"""Cost models of given costs."""

from __future__ import annotations

import numpy as np

from orchestrator.core.arrays import FloatArray
from orchestrator.core.cost_model import Batch, CostModel, CostModels, Curve, PassCosts


def cost_model_of(seconds: FloatArray, others_tokens: float = 0.0) -> CostModel:
    """Return the cost model by which a request's 1, 2, … rows take these seconds, (n,) float64."""
    costs = PassCosts(Curve(np.arange(1.0, len(seconds) + 1), seconds, 0.0))
    return CostModels(costs, Batch(others_tokens, rows=0.0, tokens=1.0, num_kv_tokens=0.0), single_s=0.0).at(0)
