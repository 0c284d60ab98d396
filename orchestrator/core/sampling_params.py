"""What a request says of the target's distribution p, and of how drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

# Medusa's (arXiv:2401.10774, section 2.3.1), as float32 has them, since that is how they cross the wire.
EPSILON, DELTA = float(np.float32(0.09)), float(np.float32(0.3))


class Rule(StrEnum):
    """How drafts are accepted (orchestrator/sampling/accept.py); `typical` alone is lossy.

    `engine` is decided by an engine that samples by itself (TensorRT-LLM's), with random numbers of its own: its texts
    have the target's law, but one seed gives other texts under other drafts.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"
    TYPICAL = "typical"
    ENGINE = "engine"

    @property
    def uses_q(self) -> bool:
        """True when it matters what a draft was drawn from."""
        return self in (Rule.REJECTION, Rule.BLOCK)


#: The rules that engines of our own decide by.
OUR_RULES = tuple(rule for rule in Rule if rule is not Rule.ENGINE)


class Grammar(NamedTuple):
    """What the output must match. kind: json, json_schema or regex. text: the schema or the expression."""

    kind: str
    text: str


@dataclass(frozen=True)
class LogitsOptions:
    """What a request changes of single tokens' logits; empty changes nothing.

    bias: (id, weight), added to the logit. grammar: what the output must match. allowed: the only ids that may come;
    empty = all. bad_words: id sequences that may not come. end_ids: those that end the output, and that may not come
    before min_tokens.
    """

    bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()


NO_LOGITS_OPTIONS = LogitsOptions()


@dataclass(frozen=True)
class Sampling:
    """How logits become the one distribution p, and how drafts are accepted; the defaults change nothing.

    temperature 0 = greedy · top_k 0 = off · top_p, typical_p 1 = off · min_p 0 = off · repetition_penalty 1 = off,
    on prompt and output · presence_penalty, frequency_penalty 0 = off, on the output · min_tokens: so many before an
    end. The seed keys the noise. epsilon, delta: of the rule `typical`.
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
        """True when the pick is the argmax of the logits."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when what was said changes what may be said."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def shaped(self) -> bool:
        """True when single logits change before the temperature (orchestrator/sampling/logits_processors.py)."""
        logits_options = self.logits_options
        masked = logits_options.bias or logits_options.grammar or logits_options.allowed or logits_options.bad_words
        return bool(self.penalised or masked or (self.min_tokens and logits_options.end_ids))
