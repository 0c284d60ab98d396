"""What both stand-ins for TensorRT-LLM run in place of its engines: a stock model, and a sampler with its own numbers."""

import functools
import itertools
from pathlib import Path

import numpy as np
import torch


@functools.cache
def load(checkpoint):
    """Return the stock model, exact in float64."""
    from benchmarks.stock_model import StockModel

    return StockModel(Path(checkpoint)).model


@functools.lru_cache(4096)
@torch.inference_mode()
def logits_of(checkpoint, ids, num_rows):
    """Return (num_rows, V) float64 logits after the last ids; remembered, since the tests ask much the same."""
    output = load(checkpoint)(input_ids=torch.tensor([ids]), use_cache=False)
    return output.logits[0, -num_rows:].double().numpy()


def guess(checkpoint, context, num_drafts, rng):
    """Draft what the model would say, each token wrong one time in five."""
    drafts, vocab_size = [], load(checkpoint).config.vocab_size
    while len(drafts) < num_drafts:
        said = int(logits_of(checkpoint, tuple(context + drafts), 1)[0].argmax())
        drafts.append(int(rng.integers(vocab_size)) if rng.random() < 0.2 else said)
    return drafts


def verify(checkpoint, context, drafts, pick):
    """Return the tokens of a pass, drafts accepted where `pick(logits)` gives the same, and the rows of their logits."""
    rows, new = logits_of(checkpoint, tuple(context + drafts), len(drafts) + 1), []
    for row, draft in itertools.zip_longest(rows, drafts):
        new.append(pick(row, context + new))
        if new[-1] != draft:
            break
    return new, rows[: len(new)]


def distribution(logits, temperature, top_k, top_p):
    """Return the distribution that the sampler draws from, (V,) float64; top_k 1 is greedy, 0 and top_p 1 are off."""
    if top_k == 1:
        return np.eye(len(logits))[logits.argmax()]
    probs = softmax(logits / (temperature or 1.0))
    order = np.argsort(-probs, kind="stable")
    ranked = np.where(np.arange(len(probs)) < (top_k or len(probs)), probs[order], 0.0)
    ranked = ranked / ranked.sum()
    ranked = np.where(ranked.cumsum() - ranked < (1.0 if top_p is None else top_p), ranked, 0.0)
    result = np.zeros_like(probs)
    result[order] = ranked / ranked.sum()
    return result


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
