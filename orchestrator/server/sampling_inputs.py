"""Reads a request's sampling from its inputs: which tokens may come next, how probable each is, the acceptance rule."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

import numpy as np

from orchestrator.core.deployment.checkpoint import Checkpoint
from orchestrator.core.errors import RequestError, abbreviated, unknown_name
from orchestrator.core.grammar import KINDS
from orchestrator.core.sampling_params import EPSILON, OUR_RULES, Grammar, LogitsOptions, Rule, Sampling
from orchestrator.server.inputs import MAX_BIASED, RequestInputs, check_count, check_ids


def sampling_of(
    inputs: RequestInputs,
    logits_options: LogitsOptions,
    default_rule: Rule = Rule.COUPLED,
    default_epsilon: float = EPSILON,
    default_temperature: float = 0.0,
) -> Sampling:
    """Return a request's sampling; the defaults are those of the target's engine.

    top_k ≤ 0 and top_p 0 or 1 mean off. Without a temperature, top_k > 1 or 0 < top_p < 1 implies temperature 1.
    A request without a seed gets a random one.
    """
    temperature, seed = inputs.temperature, inputs.seed
    if temperature is None:
        temperature = 1.0 if inputs.top_k > 1 or 0.0 < inputs.top_p < 1.0 else default_temperature
    return Sampling(
        temperature,
        top_k=max(inputs.top_k, 0),
        top_p=inputs.top_p or 1.0,
        min_p=inputs.min_p,
        typical_p=inputs.typical_p or 1.0,
        repetition_penalty=inputs.repetition_penalty,
        presence_penalty=inputs.presence_penalty,
        frequency_penalty=inputs.frequency_penalty,
        min_tokens=inputs.min_tokens,
        epsilon=default_epsilon if inputs.typical_epsilon is None else inputs.typical_epsilon,
        delta=inputs.typical_delta,
        seed=secrets.randbits(64) if seed is None else seed,
        rule=_rule(inputs, default_rule),
        logits_options=logits_options,
    )


def _rule(inputs: RequestInputs, default: Rule) -> Rule:
    """Return the request's acceptance rule; TensorRT-LLM's clients ask for `rejection` with use_draft_logits."""
    by_flag = Rule.REJECTION if inputs.use_draft_logits else default
    name = inputs.rule or by_flag
    if name not in [rule.value for rule in Rule]:
        served = [default] if default is Rule.ENGINE else OUR_RULES
        raise RequestError(unknown_name("rule", name, [rule.value for rule in served], "input rule"))
    if by_flag is Rule.REJECTION and name != by_flag:
        raise RequestError(f"use_draft_logits asks for the rule 'rejection', got {name!r} (input rule)")
    return Rule(name)


def logits_options_of(inputs: RequestInputs, checkpoint: Checkpoint, end_ids: Collection[int]) -> LogitsOptions:
    """Return how a request changes the logits of single tokens; raises RequestError for inputs that contradict.

    end_ids: the ids that end the output. Whether a grammar compiles is not checked here, since that may take long.
    """
    allowed = inputs.allowed_token_ids
    check_count("allowed_token_ids", len(allowed), checkpoint.vocab_size)
    check_ids("allowed_token_ids", allowed, checkpoint.vocab_size)
    return LogitsOptions(
        bias=_bias(inputs, checkpoint),
        grammar=_grammar(inputs, end_ids),
        allowed=tuple(sorted(set(allowed))),
        bad_words=_bad_words(inputs.bad_words, checkpoint),
        end_ids=tuple(token for token in sorted(end_ids) if 0 <= token < checkpoint.vocab_size),
    )


def _bias(inputs: RequestInputs, checkpoint: Checkpoint) -> tuple[tuple[int, float], ...]:
    """Return (id, weight) for each biased id and each token of the biased words."""
    ids, words = inputs.logit_bias_ids, inputs.embedding_bias_words
    _check_lengths("logit_bias_ids", ids, "logit_bias_weights", inputs.logit_bias_weights)
    _check_lengths("embedding_bias_words", words, "embedding_bias_weights", inputs.embedding_bias_weights)
    check_ids("logit_bias_ids", ids, checkpoint.vocab_size)
    pairs = list(zip(ids, inputs.logit_bias_weights, strict=True))
    for word, weight in zip(words, inputs.embedding_bias_weights, strict=True):
        pairs += [(token, weight) for token in _encoded(checkpoint, word)]
    if len(pairs) > MAX_BIASED:
        where = "input logit_bias_ids, and the tokens of embedding_bias_words"
        raise RequestError(f"there are {len(pairs)} biased tokens, at most {MAX_BIASED} allowed ({where})")
    return merged_bias(pairs)


def _check_lengths(name: str, values: Sequence[object], weights_name: str, weights: Sequence[float]) -> None:
    if len(values) != len(weights):
        raise RequestError(f"{name} has {len(values)} entries, but {weights_name} has {len(weights)}; they must match")


def _bad_words(words: Sequence[str], checkpoint: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the bad words: of each as it is, and with a space in front, as most words occur."""
    found = dict.fromkeys(tuple(_encoded(checkpoint, text)) for word in words for text in (word, f" {word}"))
    found.pop((), None)
    return tuple(found)


def _encoded(checkpoint: Checkpoint, text: str) -> list[int]:
    """Return the tokens of a text in the middle of another."""
    return checkpoint.encode(text, add_special_tokens=False)


def _grammar(inputs: RequestInputs, end_ids: Collection[int]) -> Grammar | None:
    """Return the grammar that the output must match, if any; raises RequestError for inputs that exclude it."""
    kind, guide = inputs.guided_decoding_guide_type, inputs.guided_decoding_guide
    if not kind and not guide:
        return None
    where = "input guided_decoding_guide_type"
    if kind not in KINDS:
        raise RequestError(unknown_name("guide type", kind, KINDS, where))
    needs_guide = kind != "json"
    if needs_guide != bool(guide):
        needs = "needs" if needs_guide else "takes no"
        raise RequestError(f"guide type {kind!r} {needs} guided_decoding_guide, got {abbreviated(guide)} ({where})")
    if inputs.min_tokens:
        raise RequestError("min_tokens and a grammar exclude each other: a grammar decides by itself when it may end")
    if not end_ids:
        raise RequestError("a grammar needs an end: with ignore_eos there must be stop_ids (input ignore_eos)")
    return Grammar(kind, guide)


def merged_bias(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return one (id, weight) pair per id: the sum of its weights, rounded to float32 as on the wire."""
    weights: dict[int, float] = {}
    for token, weight in pairs:
        weights[token] = float(np.float32(weights.get(token, 0.0) + weight))
    return tuple(weights.items())
