"""What a build may use: the device, and limits of time and tokens that shorten the recipes' plans."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from build.errors import BuildError
from build.recipe import TARGET, Plan

#: The share of the time that each stage may take; the rest is for loading, measuring and publishing.
SHARES: Mapping[str, float] = {"target": 0.5, "draft": 0.12, "continuations": 0.05, "heads": 0.2}
#: Tokens of an optimizer step on a GPU, where small steps leave it idle.
GPU_STEP_TOKENS = 16_384


@dataclass(frozen=True)
class Limits:
    """What a build may use. device: cpu or cuda. hours: of all stages together; 0 = as planned.

    tokens: the target's training tokens; those of the other stages are scaled with them; 0 = as planned.
    """

    device: str = "cpu"
    hours: float = 0.0
    tokens: int = 0

    def seconds_of(self, stage: str) -> float:
        """Return the seconds that a stage may take; 0: no limit."""
        return 3600 * self.hours * SHARES[stage] if self.hours else 0.0

    def plan_of(self, plan: Plan) -> Plan:
        """Return a stage's plan on this device, its tokens scaled as the target's are."""
        if self.tokens:
            plan = replace(plan, tokens=max(plan.tokens * self.tokens // TARGET.plan.tokens, plan.step_tokens))
        if self.device.startswith("cuda"):
            plan = replace(plan, step_tokens=min(max(plan.step_tokens, GPU_STEP_TOKENS), plan.tokens))
        return plan


NO_LIMITS = Limits()


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options from which `limits_of` reads."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=0.0, help="limit of time for all stages (default: none)")
    parser.add_argument("--tokens", type=int, default=0, help="the target's training tokens; others in proportion")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")


def limits_of(options: argparse.Namespace) -> Limits:
    """Return the limits that the options set, and set the number of threads; raises BuildError for invalid ones."""
    if options.hours < 0 or options.tokens < 0:
        raise BuildError(f"limits must be positive, got --hours {options.hours} --tokens {options.tokens}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise BuildError("--device cuda: this torch finds no CUDA device")
    if options.threads:
        torch.set_num_threads(options.threads)
    return Limits(options.device, options.hours, options.tokens)
