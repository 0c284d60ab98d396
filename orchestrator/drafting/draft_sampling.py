"""The sampling of a draft: the target's, unless the request sets other parameters for the drafter's distribution."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from orchestrator.core.sampling_params import Sampling, as_float32
from orchestrator.drafting.parameters import MethodConfig


class DraftSamplingConfig(MethodConfig):
    """The temperature and truncation by which a drafter's logits become q; None = the target's.

    draft_temperature 0 is the argmax; draft_top_k 0 and draft_top_p 1 cut nothing. Any q keeps the target's
    distribution, and under `coupled` the text.
    Source: standardised sampling, Leviathan et al. 2023, arXiv:2211.17192, section 2.2: M_q may have its own.
    """

    draft_temperature: float | None = Field(None, ge=0.0, le=100.0)
    draft_top_k: int | None = Field(None, ge=0)
    draft_top_p: float | None = Field(None, gt=0.0, le=1.0, description="a number above 0 and at most 1")

    def draft_sampling(self, sampling: Sampling) -> Sampling:
        """Return the sampling by which a draft is made; if the target is greedy, so is the drafter."""
        if sampling.greedy:
            return sampling
        temperature, top_k, top_p = self.draft_temperature, self.draft_top_k, self.draft_top_p
        return replace(
            sampling,
            temperature=sampling.temperature if temperature is None else as_float32(temperature),
            top_k=sampling.top_k if top_k is None else top_k,
            top_p=sampling.top_p if top_p is None else as_float32(top_p),
        )
