"""What is trained and how: which heads, their sizes, token budgets and loss weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from build.errors import BuildError
from build.recipe import Plan

KINDS = ("medusa", "eagle", "eagle3", "redrafter")
#: EAGLE-1 that does not read the sampled token (docs/methods/eagle.md); trained for comparison, never published.
ABLATED = "eagle_without_token"


@dataclass(frozen=True)
class Part:
    """How one head is trained.

    depth: tokens after the root that it learns to predict. decay: weight of a depth relative to the one before.
    share: share of a window's rows from which it drafts. text: weight of the loss on the text, in 0 … 1; the rest is on
    the target's p.
    """

    peak_rate: float
    depth: int = 1
    decay: float = 0.8
    share: float = 1.0
    text: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Sizes that the target does not fix; exit_dim 0: twice its hidden size, draft_vocab 0: half its vocabulary."""

    medusa_heads: int = 4
    medusa_layers: int = 1
    redrafter_layers: int = 1
    exit_dim: int = 0
    draft_vocab: int = 0


#: Rates were tuned on the demo target. Weights are the papers', but Medusa learns the target's p, not the text.
PARTS: Mapping[str, Part] = {
    "medusa": Part(peak_rate=1e-3, depth=4, share=0.5),
    "eagle": Part(peak_rate=3e-3),
    "eagle3": Part(peak_rate=3e-3, depth=4),
    "redrafter": Part(peak_rate=2e-3, depth=5, decay=0.9, share=0.25),
}


PLAN = Plan(tokens=3_000_000, peak_rate=1.0, step_tokens=2_048)


@dataclass(frozen=True)
class Settings:
    """Everything that determines trained heads, given target and corpus; the plan's rate is a share of each peak rate.

    feature_weight, token_weight: of EAGLE-1's losses (arXiv:2401.15077, section 3.2). noise: half the width of the
    noise on its features, in windows of up to 512. own_tokens: number of tokens of the target's own continuations,
    which every second step reads; 0: none.
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
    own_tokens: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that are trained: the heads and, with `ablation`, the ablated one."""
        return (*self.kinds, *((ABLATED,) if self.ablation else ()))

    @property
    def sha256(self) -> str:
        """SHA-256 of all settings but the plan, which a run may cut short."""
        fields = {key: value for key, value in asdict(self).items() if key != "plan"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def part(self, name: str) -> Part:
        """Return how the module `name` is trained; the ablated head is trained as EAGLE."""
        return self.parts["eagle" if name == ABLATED else name]


def kinds_named(text: str) -> tuple[str, ...]:
    """Return the kinds of a comma-separated list, in the order of KINDS."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise BuildError(f"unknown head {', '.join(unknown)!r}; the heads are {', '.join(KINDS)} (--heads)")
    return tuple(kind for kind in KINDS if kind in names)
