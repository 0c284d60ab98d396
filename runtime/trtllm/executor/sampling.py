"""A request's sampling in the executor's words; what it has no words for was refused before (capabilities)."""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.core.noise import child_seed
from orchestrator.core.sampling_params import Sampling


def sampling_config(api: Any, sampling: Sampling, prefix_len: int, num_output: int) -> Any:
    """Return the SamplingConfig of the step behind `prefix_len` tokens, `num_output` of them output.

    Invariant: the steps of one request have seeds that have nothing to do with one another. Each step is a request of its
    own, and with one seed for all, the executor would begin each with the same random number.
    """
    if sampling.greedy:
        values: dict[str, Any] = {"top_k": 1}
    else:
        values = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": child_seed(sampling.seed, prefix_len),
        }
    if sampling.repetition_penalty != 1.0:
        values["repetition_penalty"] = sampling.repetition_penalty
    if held := num_held(sampling, num_output):
        values["min_tokens"] = held
    return api.SamplingConfig(**values)


def edits_of(sampling: Sampling, num_output: int, vocab_size: int) -> dict[str, Any]:
    """Return the arguments of Request that change single logits: bias, bad words, no end before min_tokens.

    An end id is named only while it may not come, so that the executor never ends a text: the loop does.
    """
    logits_options = sampling.logits_options
    arguments: dict[str, Any] = {}
    if logits_options.bias:
        bias = torch.zeros(vocab_size)
        for token, weight in logits_options.bias:
            bias[token] = weight
        arguments["embedding_bias"] = bias
    if logits_options.bad_words:
        arguments["bad_words"] = [list(word) for word in logits_options.bad_words]
    if num_held(sampling, num_output):
        arguments["end_id"] = logits_options.end_ids[0]
    return arguments


def num_held(sampling: Sampling, num_output: int) -> int:
    """Return for how many more tokens no end may come."""
    return max(sampling.min_tokens - num_output, 0) if sampling.logits_options.end_ids else 0


def is_edited(sampling: Sampling, num_output: int) -> bool:
    """True when single logits change; how the executor applies that to drafts is not established, so it gets none."""
    logits_options = sampling.logits_options
    return bool(sampling.penalised or logits_options.bias or logits_options.bad_words or num_held(sampling, num_output))
