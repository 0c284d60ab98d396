"""What native code must know about a request's sampling to rank tokens as the target will choose among them."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int32, c_uint64

from orchestrator.core.sampling_params import Rule, Sampling


class RankingFields(Structure):
    """How the target samples, as `native::Ranking`."""

    _fields_ = [
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "typical_p", "sharpness")),
        ("seed", c_uint64),
        ("top_k", c_int32),
        *((name, c_int32) for name in ("takes_argmax", "draws", "epoch")),
    ]


def ranking_of(sampling: Sampling, sharpness: float, draws: bool = False, epoch: int = 0) -> RankingFields:
    """Return the fields of a request's sampling. draws: tokens are sampled from q; epoch: the step, for their noise."""
    takes_argmax = sampling.greedy or sampling.rule is Rule.COUPLED
    return RankingFields(
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.typical_p, sharpness,
        sampling.seed & (1 << 64) - 1, sampling.top_k, takes_argmax, draws, epoch,
    )  # fmt: skip
