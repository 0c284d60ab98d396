"""What is trained and how, all pure: which heads, their sizes, budgets and weights; it does not train."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from build.errors import BuildError
from build.recipe import Plan

KINDS = ("medusa", "eagle", "eagle3", "redrafter")
#: EAGLE-1 that does not see the sampled token (docs/methods/eagle.md); trained beside the others, never shipped.
ABLATED = "eagle_without_token"


@dataclass(frozen=True)
class Part:
    """How one head is trained.

    depth: places after the root that it learns. decay: weight of each place, of that before. share: of the window's
    places from which it is unrolled. text: share of the loss that asks for the text, the rest for the target's p.
    """

    peak_rate: float
    depth: int = 1
    decay: float = 0.8
    share: float = 1.0
    text: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the heads that are not the target's; 0: twice the hidden size, half the vocabulary."""

    medusa_heads: int = 4
    medusa_layers: int = 1
    redrafter_layers: int = 1
    exit_dim: int = 0
    draft_vocab: int = 0


#: Rates found for the demo target; weights as in the papers, but Medusa learns the target's p, not the text.
PARTS: Mapping[str, Part] = {
    "medusa": Part(peak_rate=1e-3, depth=4, share=0.5),
    "eagle": Part(peak_rate=3e-3),
    "eagle3": Part(peak_rate=3e-3, depth=4),
    "redrafter": Part(peak_rate=2e-3, depth=5, decay=0.9, share=0.25),
}


PLAN = Plan(tokens=3_000_000, peak_rate=1.0, step_tokens=2_048)


@dataclass(frozen=True)
class Settings:
    """Everything that determines trained heads, given target and corpus; the plan's rate is a share of each peak.

    feature_weight, token_weight: EAGLE-1's losses (arXiv:2401.15077, section 3.2). noise: half-width of what is added
    to its features, of windows of 512.
    """

    kinds: tuple[str, ...] = KINDS
    ablation: bool = False
    sizes: Sizes = Sizes()
    plan: Plan = PLAN
    parts: Mapping[str, Part] = field(default_factory=lambda: dict(PARTS))
    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.1
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    seed: int = 20_261_121
    dtype: str = "bfloat16"

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that are trained: the heads and, when asked for, the ablated one."""
        return (*self.kinds, *((ABLATED,) if self.ablation else ()))

    @property
    def sha256(self) -> str:
        """SHA-256 of all but the plan, whose end may change while it is followed."""
        fields = {key: value for key, value in asdict(self).items() if key != "plan"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def part(self, name: str) -> Part:
        """How the module `name` is trained; the ablated head as EAGLE."""
        return self.parts["eagle" if name == ABLATED else name]


def kinds_named(text: str) -> tuple[str, ...]:
    """The kinds of a comma-separated list, in the order of KINDS."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise BuildError(f"unknown head {', '.join(unknown)!r}; the heads are {', '.join(KINDS)} (--heads)")
    return tuple(kind for kind in KINDS if kind in names)
