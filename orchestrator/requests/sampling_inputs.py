"""From a request's inputs to its sampling: which token may come next, how probably, and how drafts are accepted."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

import numpy as np

from orchestrator.core.errors import RequestError, shown, unknown_name
from orchestrator.core.sampling_params import DELTA, EPSILON, OUR_RULES, Grammar, LogitsOptions, Rule, Sampling
from orchestrator.deployment.checkpoint import Checkpoint
from orchestrator.requests.inputs import RequestInputs, check_ids, check_range, check_words
from orchestrator.sampling.grammar import KINDS
from orchestrator.sampling.logits_processors import merged_bias

MAX_BIASED = 1024
MAX_PENALTY = 100.0
# As float32 has it, since every number of a request is one.
MIN_PENALTY = float(np.float32(0.01))
MAX_WEIGHT = 1000.0


def sampling_of(
    given: RequestInputs, logits_options: LogitsOptions, max_tokens: int, default_rule: Rule = Rule.COUPLED
) -> Sampling:
    """Return the sampling that a request asks for; none of its inputs set means greedy.

    top_k ≤ 0 and top_p 0 or 1 are off. Without a temperature, top_k > 1 or 0 < top_p < 1 mean temperature 1.
    An unseeded request draws its own seed.
    """
    top_k, top_p = given.get("top_k", 0), _number(given, "top_p", 1.0, 0.0, 1.0)
    draws = top_k > 1 or 0.0 < top_p < 1.0
    return Sampling(
        _number(given, "temperature", 1.0 if draws else 0.0, 0.0, 100.0),
        top_k=max(top_k, 0),
        top_p=top_p or 1.0,
        min_p=_number(given, "min_p", 0.0, 0.0, 1.0),
        typical_p=_number(given, "typical_p", 1.0, 0.0, 1.0) or 1.0,
        repetition_penalty=_number(given, "repetition_penalty", 1.0, MIN_PENALTY, MAX_PENALTY),
        presence_penalty=_number(given, "presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_number(given, "frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        min_tokens=min_tokens_of(given, max_tokens),
        epsilon=_number(given, "typical_epsilon", EPSILON, 0.0, 1.0),
        delta=_number(given, "typical_delta", DELTA, 0.0, 1.0),
        seed=_seed(given),
        rule=_rule(given, default_rule),
        logits_options=logits_options,
    )


def _number(given: RequestInputs, name: str, default: float, low: float, high: float) -> float:
    value: float = given.get(name, default)
    check_range(name, value, low, high)
    return value


def min_tokens_of(given: RequestInputs, max_tokens: int) -> int:
    """Return how many tokens must come before an end; `min_length` is the older name."""
    name = "min_tokens" if "min_tokens" in given else "min_length"
    value: int = given.get(name, 0)
    check_range(name, value, 0, max_tokens)
    return value


def _seed(given: RequestInputs) -> int:
    name = "seed" if "seed" in given else "random_seed"
    seed: int | None = given.get(name)
    if seed is None:
        return secrets.randbits(64)
    if not 0 <= seed < 1 << 64:
        raise RequestError(f"{name} must be in 0..2^64 - 1, got {seed} (input {name})")
    return seed


def _rule(given: RequestInputs, default: Rule) -> Rule:
    """Return the rule that is asked for; use_draft_logits is how TensorRT-LLM's clients ask for `rejection`."""
    by_flag = Rule.REJECTION if given.get("use_draft_logits", False) else default
    name = given.get("rule", "") or by_flag
    if name not in [rule.value for rule in Rule]:
        served = [default] if default is Rule.ENGINE else OUR_RULES
        raise RequestError(unknown_name("rule", name, [rule.value for rule in served], "input rule"))
    if by_flag is Rule.REJECTION and name != by_flag:
        raise RequestError(f"use_draft_logits asks for the rule 'rejection', got {name!r} (input rule)")
    return Rule(name)


def edits_of(given: RequestInputs, checkpoint: Checkpoint, end_ids: Collection[int]) -> LogitsOptions:
    """Return what a request changes of single tokens' logits; raises RequestError for what cannot be.

    end_ids: those that end the output. Whether a grammar can be followed is not checked here, since that takes long.
    """
    allowed = given.get("allowed_token_ids", [])
    if len(allowed) > checkpoint.vocab_size:
        what = f"{len(allowed)} entries, at most {checkpoint.vocab_size} allowed"
        raise RequestError(f"allowed_token_ids has {what} (input allowed_token_ids)")
    check_ids("allowed_token_ids", allowed, checkpoint.vocab_size)
    grammar = _grammar(given, end_ids)
    ends = [token for token in sorted(end_ids) if 0 <= token < checkpoint.vocab_size]
    return LogitsOptions(
        _bias(given, checkpoint), grammar, tuple(sorted(set(allowed))), _bad_words(given, checkpoint), tuple(ends)
    )


def _bias(given: RequestInputs, checkpoint: Checkpoint) -> tuple[tuple[int, float], ...]:
    """Return the weight of every biased id: by id, and of every token of the biased words."""
    ids, weights = _pairs(given, "logit_bias_ids", "logit_bias_weights")
    words, word_weights = _pairs(given, "embedding_bias_words", "embedding_bias_weights")
    check_ids("logit_bias_ids", ids, checkpoint.vocab_size)
    check_words("embedding_bias_words", words)
    pairs = list(zip(ids, weights, strict=True))
    for word, weight in zip(words, word_weights, strict=True):
        pairs += [(token, weight) for token in encoded(checkpoint, word)]
    if len(pairs) > MAX_BIASED:
        where = "input logit_bias_ids, and the tokens of embedding_bias_words"
        raise RequestError(f"there are {len(pairs)} biased tokens, at most {MAX_BIASED} allowed ({where})")
    return merged_bias(pairs)


def _pairs(given: RequestInputs, keys: str, weights: str) -> tuple[list[Any], list[float]]:
    """Return two inputs that belong together entry by entry."""
    left, right = given.get(keys, []), given.get(weights, [])
    if len(left) != len(right):
        raise RequestError(f"{keys} has {len(left)} entries, but {weights} has {len(right)}; they must match")
    for weight in right:
        check_range(weights, weight, -MAX_WEIGHT, MAX_WEIGHT)
    return left, right


def _bad_words(given: RequestInputs, checkpoint: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of the bad words, each as it is and behind a space, where most words stand."""
    words = given.get("bad_words", [])
    check_words("bad_words", words)
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            found[tuple(encoded(checkpoint, text))] = None
    found.pop((), None)
    return tuple(found)


def encoded(checkpoint: Checkpoint, text: str) -> list[int]:
    """Return the tokens of a text that stands in the middle of another."""
    ids: list[int] = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _grammar(given: RequestInputs, end_ids: Collection[int]) -> Grammar | None:
    kind, guide = given.get("guided_decoding_guide_type", ""), given.get("guided_decoding_guide", "")
    if not kind and not guide:
        return None
    where = "input guided_decoding_guide_type"
    if kind not in KINDS:
        raise RequestError(unknown_name("guide type", kind, KINDS, where))
    needs_guide = kind != "json"
    if needs_guide != bool(guide):
        needs = "needs" if needs_guide else "takes no"
        raise RequestError(f"guide type {kind!r} {needs} guided_decoding_guide, got {shown(guide)} ({where})")
    if given.get("min_tokens", 0) or given.get("min_length", 0):
        raise RequestError("min_tokens and a grammar exclude each other: a grammar decides by itself when it may end")
    if not end_ids:
        raise RequestError("a grammar needs an end: with ignore_eos there must be stop_ids (input ignore_eos)")
    return Grammar(kind, guide)
