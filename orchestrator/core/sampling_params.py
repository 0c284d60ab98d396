"""A request's sampling parameters: they define the target's distribution p, and how drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np


def as_float32(value: float) -> float:
    """Return a number rounded to float32, the type in which a request's numbers cross the wire."""
    return float(np.float32(value))


#: Medusa's ε and δ (arXiv:2401.10774, section 2.3.1).
EPSILON, DELTA = as_float32(0.09), as_float32(0.3)


class Rule(StrEnum):
    """How drafts are accepted (docs/losslessness.md, Rules). Only `typical` is lossy.

    `engine`: an engine that samples by itself (TensorRT-LLM) decides, with random numbers of its own. Its texts have
    the target's distribution, but for one seed, different drafts give different texts.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"
    TYPICAL = "typical"
    ENGINE = "engine"

    @property
    def uses_q(self) -> bool:
        """True if acceptance depends on the distribution that a draft was sampled from."""
        return self in (Rule.REJECTION, Rule.BLOCK)


#: The rules that our own engines implement.
OUR_RULES = tuple(rule for rule in Rule if rule is not Rule.ENGINE)


class Grammar(NamedTuple):
    """What the output must match. kind: json, json_schema or regex. text: the schema or the regular expression."""

    kind: str
    text: str


@dataclass(frozen=True)
class LogitsOptions:
    """How a request changes the logits of single tokens; the defaults change nothing.

    bias: (id, weight) pairs; the weight is added to the logit. grammar: what the output must match.
    allowed: the only ids that may be generated; empty: all. bad_words: id sequences that may not be generated.
    end_ids: ids that end the output; they are masked until min_tokens are generated.
    """

    bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()


NO_LOGITS_OPTIONS = LogitsOptions()


@dataclass(frozen=True)
class Sampling:
    """How logits become the distribution p, and how drafts are accepted; the defaults are greedy decoding.

    temperature 0 is greedy. These values switch a parameter off: top_k 0 · top_p, typical_p 1 · min_p 0 ·
    repetition_penalty 1 (it covers prompt and output) · presence_penalty, frequency_penalty 0 (they cover the output) ·
    min_tokens 0. seed: the key of the noise. epsilon, delta: parameters of the rule `typical`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    epsilon: float = EPSILON
    delta: float = DELTA
    seed: int = 0
    rule: Rule = Rule.COUPLED
    logits_options: LogitsOptions = NO_LOGITS_OPTIONS

    @property
    def greedy(self) -> bool:
        """True if the target takes the token with the highest logit."""
        return self.temperature == 0.0

    @property
    def is_independent_of_drafts(self) -> bool:
        """True if a seed's text is the same whatever is drafted."""
        return self.rule is Rule.COUPLED or (self.greedy and self.rule is not Rule.TYPICAL)

    @property
    def penalised(self) -> bool:
        """True if tokens that occurred before are penalised."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def unguided(self) -> Sampling:
        """The same without a grammar, as a drafter samples; the grammar prunes its drafts afterwards."""
        options = self.logits_options
        return replace(self, logits_options=replace(options, grammar=None)) if options.grammar else self

    @property
    def needs_logits_processors(self) -> bool:
        """True if logits are changed before the temperature (docs/sampling.md)."""
        options = self.logits_options
        masked = options.grammar or options.allowed or options.bad_words or (self.min_tokens and options.end_ids)
        return bool(self.penalised or options.bias or masked)
