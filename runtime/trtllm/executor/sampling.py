"""A request's sampling as arguments of the executor; the capabilities refuse options that it lacks."""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import Sampling


def sampling_config(api: Any, sampling: Sampling, prefix_len: int, num_output: int) -> Any:
    """Return the SamplingConfig of the step after `prefix_len` tokens, `num_output` of them output.

    Invariant: the steps of one request have independent seeds. Each step is a request of its own to the executor, which
    would start every step with the same random number if they shared a seed.
    """
    values: dict[str, Any] = {"top_k": 1}
    if not sampling.greedy:
        values = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": child_seed(sampling.seed, prefix_len),
        }
    if sampling.repetition_penalty != 1.0:
        values["repetition_penalty"] = sampling.repetition_penalty
    if min_tokens := tokens_without_end(sampling, num_output):
        values["min_tokens"] = min_tokens
    return api.SamplingConfig(**values)


def logits_arguments(sampling: Sampling, num_output: int, vocab_size: int) -> dict[str, Any]:
    """Return the arguments of Request that change single logits: bias, bad words, no end before min_tokens.

    An end id is sent only while it is forbidden, so that the generation loop ends a text, never the executor.
    """
    options = sampling.logits_options
    arguments: dict[str, Any] = {}
    if options.bias:
        bias = torch.zeros(vocab_size)
        for token, weight in options.bias:
            bias[token] = weight
        arguments["embedding_bias"] = bias
    if options.bad_words:
        arguments["bad_words"] = [list(word) for word in options.bad_words]
    if tokens_without_end(sampling, num_output):
        arguments["end_id"] = options.end_ids[0]
    return arguments


def tokens_without_end(sampling: Sampling, num_output: int) -> int:
    """Return how many more tokens must come before the text may end."""
    return max(sampling.min_tokens - num_output, 0) if sampling.logits_options.end_ids else 0


def changes_logits(sampling: Sampling, num_output: int) -> bool:
    """Return whether single logits change; it is not known how the executor applies that to draft tokens."""
    options = sampling.logits_options
    return bool(sampling.penalised or options.bias or options.bad_words or tokens_without_end(sampling, num_output))
