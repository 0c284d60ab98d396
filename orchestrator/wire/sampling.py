"""How a request's sampling crosses to an engine: a vector of numbers, the seed, the rule, what edits single logits.

What is at its default is omitted, the vector and the seed excepted (docs/protocol.md, Target wire).
"""

from __future__ import annotations

import numpy as np

from orchestrator.core.errors import EngineError
from orchestrator.core.sampling_params import Grammar, LogitsOptions, Rule, Sampling
from orchestrator.wire.tensors import Incoming, Tensors, ids, numbers, pack_ids, pack_text, runs, scalar, text

#: The numbers of the vector `sampling`, in this order, as FP32.
FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "epsilon", "delta",
)  # fmt: skip
_WHOLE = ("top_k", "min_tokens")


def pack_sampling(sampling: Sampling) -> Tensors:
    """Pack a sampling."""
    values = [float(getattr(sampling, name)) for name in FIELDS]
    tensors: Tensors = {"sampling": np.array(values, np.float32), "seed": np.array([sampling.seed], np.uint64)}
    if sampling.rule is not Rule.COUPLED:
        tensors |= pack_text("rule", sampling.rule)
    return tensors | _pack_edits(sampling.logits_options)


def unpack_sampling(tensors: Incoming) -> Sampling:
    """Unpack a sampling; raises EngineError when a tensor does not fit."""
    vector = tensors.get("sampling")
    if vector is None or vector.size != len(FIELDS):
        raise EngineError(f"tensor 'sampling' must hold {', '.join(FIELDS)}")
    values = dict(zip(FIELDS, map(float, vector.reshape(-1)), strict=True))
    whole = {name: int(values.pop(name)) for name in _WHOLE}
    seed, rule = scalar(tensors, "seed", 0), _rule(text(tensors, "rule"))
    return Sampling(**values, **whole, seed=seed, rule=rule, logits_options=_unpack_edits(tensors))  # type: ignore[arg-type]


def _rule(name: str) -> Rule:
    try:
        return Rule(name or Rule.COUPLED)
    except ValueError:
        raise EngineError(f"unknown rule {name!r} (allowed: {', '.join(Rule)})") from None


def _pack_edits(logits_options: LogitsOptions) -> Tensors:
    tensors = pack_ids("bias_ids", [token for token, _ in logits_options.bias])
    if logits_options.bias:
        tensors["bias_weights"] = np.array([weight for _, weight in logits_options.bias], np.float32)
    tensors |= pack_ids("bad_word_lengths", [len(word) for word in logits_options.bad_words])
    tensors |= pack_ids("bad_word_ids", [token for word in logits_options.bad_words for token in word])
    tensors |= pack_ids("allowed_ids", logits_options.allowed) | pack_ids("end_ids", logits_options.end_ids)
    kind, guide = logits_options.grammar or ("", "")
    return tensors | pack_text("grammar_kind", kind) | pack_text("grammar", guide)


def _unpack_edits(tensors: Incoming) -> LogitsOptions:
    bias_ids, weights = ids(tensors, "bias_ids").tolist(), numbers(tensors, "bias_weights").tolist()
    if len(bias_ids) != len(weights):
        raise EngineError(f"there are {len(bias_ids)} bias_ids, but {len(weights)} bias_weights")
    kind = text(tensors, "grammar_kind")
    lengths = ids(tensors, "bad_word_lengths").tolist()
    return LogitsOptions(
        bias=tuple(zip(bias_ids, weights, strict=True)),
        grammar=Grammar(kind, text(tensors, "grammar")) if kind else None,
        allowed=tuple(ids(tensors, "allowed_ids").tolist()),
        bad_words=tuple(map(tuple, runs(ids(tensors, "bad_word_ids").tolist(), lengths, "bad_word_ids"))),
        end_ids=tuple(ids(tensors, "end_ids").tolist()),
    )
