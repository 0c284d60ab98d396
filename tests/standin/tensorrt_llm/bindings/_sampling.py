"""NOT TensorRT-LLM: a sampler of its own, with its own random numbers, which are not the server's noise."""

import numpy as np


def pick(logits, request, context, num_generated, rng):
    """Return the next token; logits: (V,) float64. context: all tokens before it."""
    probs = probabilities(logits, request, context, num_generated)
    return int(probs.argmax()) if request.sampling_config.greedy else int(rng.choice(len(probs), p=probs))


def probabilities(logits, request, context, num_generated):
    """Return the distribution that the sampler draws from, (V,) float64."""
    config = request.sampling_config
    logits = shaped(logits, request, context, num_generated)
    if config.greedy:
        return np.eye(len(logits))[logits.argmax()]
    return truncated(softmax(logits / (config.temperature or 1.0)), config)


def shaped(logits, request, context, num_generated):
    config, logits = request.sampling_config, logits.copy()
    if config.repetition_penalty:
        said = sorted(set(context))
        penalty = config.repetition_penalty
        logits[said] = np.where(logits[said] > 0, logits[said] / penalty, logits[said] * penalty)
    if request.embedding_bias is not None:
        logits += request.embedding_bias.double().numpy()
    for *before, last in request.bad_words or []:
        if not before or context[-len(before) :] == before:
            logits[last] = -np.inf
    if num_generated < (config.min_tokens or 0) and request.end_id is not None:
        logits[request.end_id] = -np.inf
    return logits


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def truncated(probs, config):
    """Keep the top_k likeliest tokens, then those that reach top_p."""
    order = np.argsort(-probs, kind="stable")
    kept = np.arange(len(probs)) < (config.top_k or len(probs))
    ranked = np.where(kept, probs[order], 0.0)
    ranked = ranked / ranked.sum()
    ranked = np.where(ranked.cumsum() - ranked < (config.top_p or 1.0), ranked, 0.0)
    result = np.zeros_like(probs)
    result[order] = ranked / ranked.sum()
    return result
