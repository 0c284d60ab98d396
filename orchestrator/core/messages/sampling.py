"""A request's Sampling as flat tensors: a vector of numbers, the seed, the rule, and the logits options.

Default values are omitted, except in the vector and the seed (docs/wire.md, Target wire).
"""

from __future__ import annotations

from math import inf, isfinite

import numpy as np

from orchestrator.core.errors import EngineError
from orchestrator.core.messages.tensors import (
    MAX_VOCAB_SIZE,
    Incoming,
    Tensors,
    ids,
    numbers,
    pack_ids,
    pack_text,
    scalar,
    split,
    text,
    tokens,
)
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Rule, Sampling

#: The numbers of the vector `sampling`, in this order, as FP32.
FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "epsilon", "delta",
)  # fmt: skip
INTEGER_FIELDS = ("top_k", "min_tokens")
_SHARE, _NOT_NEGATIVE = (0.0, 1.0), (0.0, inf)
#: The lowest and the highest value of each number that may not have every finite value.
BOUNDS = {
    "temperature": _NOT_NEGATIVE,
    "top_k": _NOT_NEGATIVE,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "repetition_penalty": (float(np.finfo(np.float32).tiny), inf),
    "min_tokens": _NOT_NEGATIVE,
    "epsilon": _SHARE,
    "delta": _SHARE,
}


def pack_sampling(sampling: Sampling) -> Tensors:
    """Pack a sampling."""
    values = [float(getattr(sampling, name)) for name in FIELDS]
    tensors: Tensors = {"sampling": np.array(values, np.float32), "seed": np.array([sampling.seed], np.uint64)}
    if sampling.rule is not Rule.COUPLED:
        tensors |= pack_text("rule", sampling.rule)
    return tensors | _pack_logits_options(sampling.logits_options)


def unpack_sampling(tensors: Incoming, vocab_size: int = MAX_VOCAB_SIZE) -> Sampling:
    """Unpack a sampling; raise EngineError if a tensor is missing or invalid."""
    vector = numbers(tensors, "sampling")
    if len(vector) != len(FIELDS):
        raise EngineError(f"tensor 'sampling' must have {', '.join(FIELDS)}")
    values = dict(zip(FIELDS, vector.tolist(), strict=True))
    for name, value in values.items():
        low, high = BOUNDS.get(name, (-inf, inf))
        if not (isfinite(value) and low <= value <= high):
            raise EngineError(f"{name} must be a finite number in {low:g}..{high:g}, got {value:g} (tensor 'sampling')")
    integers = {name: int(values.pop(name)) for name in INTEGER_FIELDS}
    rule = text(tensors, "rule") or Rule.COUPLED
    if rule not in list(Rule):
        raise EngineError(f"unknown rule {rule!r} (allowed: {', '.join(Rule)})")
    return Sampling(
        **values,
        **integers,
        seed=scalar(tensors, "seed", 0),
        rule=Rule(rule),
        logits_options=_unpack_logits_options(tensors, vocab_size),
    )


def _pack_logits_options(options: LogitsOptions) -> Tensors:
    tensors = pack_ids("bias_ids", [token for token, _ in options.bias])
    if options.bias:
        tensors["bias_weights"] = np.array([weight for _, weight in options.bias], np.float32)
    kind, grammar = options.grammar or ("", "")
    return (
        tensors
        | pack_ids("bad_word_lengths", [len(word) for word in options.bad_words])
        | pack_ids("bad_word_ids", [token for word in options.bad_words for token in word])
        | pack_ids("allowed_ids", options.allowed)
        | pack_ids("end_ids", options.end_ids)
        | pack_text("grammar_kind", kind)
        | pack_text("grammar", grammar)
    )


def _unpack_logits_options(tensors: Incoming, vocab_size: int) -> LogitsOptions:
    bias_ids, weights = tokens(tensors, "bias_ids", vocab_size), numbers(tensors, "bias_weights").tolist()
    if len(bias_ids) != len(weights):
        raise EngineError(f"there are {len(bias_ids)} bias_ids, but {len(weights)} bias_weights")
    if not all(map(isfinite, weights)):
        raise EngineError("bias_weights has a number that is not finite")
    kind = text(tensors, "grammar_kind")
    lengths = ids(tensors, "bad_word_lengths").tolist()
    return LogitsOptions(
        bias=tuple(zip(bias_ids, weights, strict=True)),
        grammar=Grammar(kind, text(tensors, "grammar")) if kind else None,
        allowed=tuple(tokens(tensors, "allowed_ids", vocab_size)),
        bad_words=tuple(map(tuple, split(tokens(tensors, "bad_word_ids", vocab_size), lengths, "bad_word_ids"))),
        end_ids=tuple(tokens(tensors, "end_ids", vocab_size)),
    )
