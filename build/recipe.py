"""What is trained and how: shapes, token budgets and the learning rate schedule."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace

from transformers import LlamaConfig

from build.errors import BuildError
from build.tokenizer import END_OF_TEXT_ID, MAX_LENGTH, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int = VOCAB_SIZE

    def config(self) -> LlamaConfig:
        """Return the config of `transformers` with these sizes."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.mlp,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=END_OF_TEXT_ID,
        )


@dataclass(frozen=True)
class Phase:
    """Steps `first..last - 1` of a run, all with windows of `length` tokens."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class Plan:
    """Token budget and rate schedule: functions of the step and of these recorded numbers.

    cut_step: the step at which the last phase began early, or None. is_shortened: whether a time limit reduced tokens.
    """

    tokens: int
    peak_rate: float
    step_tokens: int = 4_096
    short_length: int = 512
    long_length: int = 2_048
    long_share: float = 0.15
    warmup_share: float = 0.03
    floor: float = 0.05
    cut_step: int | None = None
    is_shortened: bool = False

    @property
    def long_from(self) -> int:
        """The step at which windows of `long_length` begin."""
        planned = round(self.tokens * (1 - self.long_share)) // self.step_tokens
        return planned if self.cut_step is None else min(planned, self.cut_step)

    @property
    def steps(self) -> int:
        """Steps of the whole run; a cut run keeps the share of long windows."""
        if self.cut_step is None:
            return self.tokens // self.step_tokens
        return min(self.tokens // self.step_tokens, math.ceil(self.long_from / (1 - self.long_share)))

    def shortened(self, tokens: int | None) -> Plan:
        """Return the plan with at most `tokens` tokens, but at least one step; None: unchanged."""
        if tokens is None or tokens >= self.tokens:
            return self
        return replace(self, tokens=max(tokens, self.step_tokens), is_shortened=True)

    def phase(self, step: int) -> Phase:
        """Return the phase that `step` belongs to."""
        if step < self.long_from:
            return Phase(0, self.long_from, self.short_length)
        return Phase(self.long_from, self.steps, self.long_length)

    def rate(self, step: int) -> float:
        """Return the rate: linear warm-up, cosine to `floor`; a cut run has its own cosine from the cut on."""
        if self.cut_step is None or step < self.long_from:
            return self._planned_rate(step)
        start = self._planned_rate(self.long_from)
        end = self.peak_rate * self.floor
        return end + (start - end) * _cosine((step - self.long_from) / (self.steps - self.long_from))

    def _planned_rate(self, step: int) -> float:
        total = self.tokens // self.step_tokens
        warmup = max(1, round(total * self.warmup_share))
        if step < warmup:
            return self.peak_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, total - warmup)
        return self.peak_rate * (self.floor + (1 - self.floor) * _cosine(progress))


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a trained model, given corpus and tokenizer.

    teacher: name of the model whose distribution p this one's q is trained to follow, or None. teacher_weight: share of
    KL(p || q) in the loss; with 0 the model learns from the text alone. optimizer: what it is trained with.
    """

    name: str
    shape: Shape
    plan: Plan
    teacher: str | None = None
    teacher_weight: float = 0.0
    seed: int = 20_261_121
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    optimizer: str = "Muon for the layers' matrices, AdamW for the rest"

    @property
    def sha256(self) -> str:
        """SHA-256 of all fields."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


TARGET = Recipe(
    name="target",
    shape=Shape(hidden=256, layers=14, heads=4, kv_heads=2, head_dim=64, mlp=704),
    plan=Plan(tokens=18_000_000, peak_rate=1.5e-3),
)
DRAFT = Recipe(
    name="draft",
    shape=Shape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=352),
    plan=Plan(tokens=8_000_000, peak_rate=3e-3),
    teacher="target",
    teacher_weight=0.9,
)
RECIPES = {recipe.name: recipe for recipe in (TARGET, DRAFT)}


def recipe_named(name: str) -> Recipe:
    """Return the recipe of a model by its name."""
    if name not in RECIPES:
        raise BuildError(f"there is no recipe for {name!r}; the recipes are {', '.join(RECIPES)}")
    return RECIPES[name]


def _cosine(progress: float) -> float:
    """Return a factor that falls from 1 to 0 while `progress` rises from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
