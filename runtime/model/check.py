"""At load: our forward pass against the stock model's, and a warm-up through the engine's own door."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree, TreeBuilder
from orchestrator.core.types import StepOptions
from orchestrator.wire.context import Delta, delta_of
from orchestrator.wire.drafter import DraftRequest
from orchestrator.wire.target import StepRequest
from runtime.engine.calls import submit_and_wait
from runtime.engine.thread import EngineThread
from runtime.kv.batch import Pass, Segment
from runtime.kv.blocks import BlockPool
from runtime.kv.cache import KVCache
from runtime.kv.sequences import SequenceTable
from runtime.model.causal_lm import CausalModel

NUM_CHECKED = 64


class Tolerance(NamedTuple):
    """So large a share of the rows must have no |Δ log p| above `most`."""

    share: float
    most: float


# The stock norms round to float32, so float64 cannot be held to more than that. bfloat16 has 8 bits, in which a
# router now and then sends a token to another expert: a few rows of a sound model may be far off.
TOLERANCE = {
    torch.float64: Tolerance(1.0, 1e-3),
    torch.float32: Tolerance(1.0, 1e-3),
    torch.bfloat16: Tolerance(0.75, 1.0),
}


def check_ids(vocab_size: int) -> list[int]:
    """Return the fixed token ids that both models are asked about."""
    return [(7919 * i + 13) % vocab_size for i in range(NUM_CHECKED)]


@torch.inference_mode()
def stock_log_probs(model: Any) -> Tensor:
    """Return log p after each of the fixed ids by the stock model, (NUM_CHECKED, V) float64."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.tensor([check_ids(vocab_size)], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.double().log_softmax(dim=-1)


def compare(model: CausalModel, expected: Tensor, name: str) -> None:
    """Raise ConfigError when the replaced attention does not reproduce the stock model.

    A quarter goes in as context in a pass of its own, a quarter as context beside the drafts, the rest as
    drafts, each behind a wrong sibling: cached rows, context rows and tree rows are compared.
    """
    ids = check_ids(model.vocab_size)
    quarter, half = NUM_CHECKED // 4, NUM_CHECKED // 2
    tree = _with_wrong_siblings(ids[half:], model.vocab_size)
    num_slots = half + tree.num_nodes
    memory_mb = 1 + (num_slots * model.cache_shape.token_bytes(model.dtype) >> 20)
    cache = KVCache(model.cache_shape, memory_mb, 16, model.dtype, model.device)
    table = SequenceTable(BlockPool(cache.num_blocks, 16), model.max_positions)
    sequence = table.open(delta_of(Context(ids[:half]), 0, 1, ""), tree.num_nodes, half)
    first = Pass([Segment(sequence, 0, quarter)], model.device, model.dtype)
    second = Pass([Segment(sequence, quarter, half, tree)], model.device, model.dtype)
    model.forward(first, cache)
    logits = model.forward(second, cache)[::2]
    _check_log_probs(logits.double().log_softmax(dim=-1), expected[half - 1 :], TOLERANCE[model.dtype], name)
    _check_window(model, second.windows, name)


def _check_log_probs(found: Tensor, expected: Tensor, allowed: Tolerance, name: str) -> None:
    """Refuse rows of log p, (n, V) both, that differ by more than is allowed, or are no numbers."""
    worst_of_row = (found - expected).abs().amax(dim=-1)
    worst = worst_of_row.quantile(allowed.share, interpolation="higher").item()
    if not worst <= allowed.most:
        raise ConfigError(
            f"{name}: log-probabilities differ from the stock model by {worst:.2g} "
            f"(allowed {allowed.most:g}); this architecture is not supported"
        )


def _with_wrong_siblings(tokens: list[int], vocab_size: int) -> TokenTree:
    """Return the chain of `tokens` with another token before each of them: nodes 2, 4, … are the chain's."""
    builder, parent = TreeBuilder(), 0
    for token in tokens:
        builder.add(parent, (token + 1) % vocab_size)
        parent = builder.add(parent, token)
    return builder.build()


def _check_window(model: CausalModel, asked: set[int | None], name: str) -> None:
    """Refuse a family that tells its sliding window to the mask alone: we would not see it, nor would 64 tokens."""
    config = model.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if not window or not slides or not getattr(config, "use_sliding_window", True):
        return
    if window < model.max_positions and window not in asked:
        raise ConfigError(
            f"{name}: the sliding window of {window} tokens does not reach the attention; "
            "this architecture is not supported"
        )


def _whole(context: Context) -> Delta:
    return delta_of(context, 0, 1, cache_salt="warm-up")


def warm_up_target(engine: EngineThread[StepRequest], vocab_size: int) -> None:
    """Run one prefill, one plain step and one tree, greedy and drawn."""
    context = Context(check_ids(vocab_size)[:8])
    tree = TokenTree.from_paths([[0, 1], [1]])
    for drafts, sampling in ((TokenTree.bare(), Sampling()), (tree, Sampling(1.0, top_p=0.9))):
        submit_and_wait(engine.submit, StepRequest(_whole(context), drafts, sampling, StepOptions(), 1000))
    engine.release(1)


def warm_up_draft(engine: EngineThread[DraftRequest], vocab_size: int) -> None:
    """Draft one chain, greedy and drawn."""
    context = Context(check_ids(vocab_size)[:8])
    for sampling in (Sampling(), Sampling(1.0, top_p=0.9)):
        submit_and_wait(engine.submit, DraftRequest(_whole(context), sampling, 4, 4))
    engine.release(1)
