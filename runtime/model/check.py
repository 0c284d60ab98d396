"""The check at load: our forward pass against the stock model's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError
from orchestrator.core.tree import TokenTree
from orchestrator.wire.context import delta_of
from runtime.kv.batch import Pass, Segment
from runtime.kv.blocks import BlockPool
from runtime.kv.sequences import SequenceTable
from runtime.model.causal_lm import CausalModel
from runtime.native.model import NativeModel

NUM_CHECKED = 64


class Tolerance(NamedTuple):
    """At least `share` of the rows may differ from the stock model's by at most `most` in log p."""

    share: float
    most: float


# The stock norms round to float32, so float64 gets float32's tolerance. In bfloat16, rounding may make a router send a
# token to another expert, so a few rows of a correct model may be far off.
TOLERANCE = {
    torch.float64: Tolerance(1.0, 1e-3),
    torch.float32: Tolerance(1.0, 1e-3),
    torch.bfloat16: Tolerance(0.75, 1.0),
}


def probe_ids(vocab_size: int) -> list[int]:
    """Return the fixed token ids that both models run on."""
    return [(7919 * i + 13) % vocab_size for i in range(NUM_CHECKED)]


@torch.inference_mode()
def stock_log_probs(model: Any) -> Tensor:
    """Return the stock model's log p after each of the fixed ids, (NUM_CHECKED, V) float64."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.tensor([probe_ids(vocab_size)], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.double().log_softmax(dim=-1)


def check_against_stock(model: CausalModel | NativeModel, expected: Tensor, name: str) -> None:
    """Raise ConfigError when our forward pass does not reproduce the stock model.

    The first quarter of the ids is context in a pass of its own, the second is context in one pass with the drafts, and
    the rest are drafts, each behind a wrong sibling. So rows that read the cache, context and tree are all compared.
    """
    ids = probe_ids(model.vocab_size)
    quarter, half = NUM_CHECKED // 4, NUM_CHECKED // 2
    drafts = ids[half:]
    paths = [[*drafts[:level], token + wrong] for level, token in enumerate(drafts) for wrong in (1, 0)]
    tree = TokenTree.from_paths([[token % model.vocab_size for token in path] for path in paths])
    num_slots = half + tree.num_nodes
    memory_mb = 1 + (num_slots * model.cache_shape.token_bytes(model.dtype) >> 20)
    cache = model.new_cache(memory_mb, 16)
    table = SequenceTable(BlockPool(cache.num_blocks, 16), model.max_positions)
    sequence = table.open(delta_of(Context(ids[:half]), 0, 1, ""), tree.num_nodes, half)
    first = Pass([Segment(sequence, 0, quarter)], model.device, model.dtype)
    second = Pass([Segment(sequence, quarter, half, tree)], model.device, model.dtype)
    model.forward(first, cache)
    logits = model.forward(second, cache)[::2]
    _check_log_probs(logits.double().log_softmax(dim=-1), expected[half - 1 :], TOLERANCE[model.dtype], name)
    if isinstance(model, CausalModel):  # the native pass takes the windows from the configuration
        _check_window(model, second.windows, name)


def _check_log_probs(found: Tensor, expected: Tensor, allowed: Tolerance, name: str) -> None:
    """Raise ConfigError when rows of log p, both (n, V), differ by more than the tolerance or hold NaN."""
    worst_of_row = (found - expected).abs().amax(dim=-1)
    worst = worst_of_row.quantile(allowed.share, interpolation="higher").item()
    if not worst <= allowed.most:
        raise ConfigError(
            f"{name}: log-probabilities differ from the stock model by {worst:.2g} "
            f"(allowed {allowed.most:g}); this architecture is not supported"
        )


def _check_window(model: CausalModel, used: set[int | None], name: str) -> None:
    """Raise ConfigError for a family that passes its sliding window to the mask alone.

    Our attention would not see the window, and NUM_CHECKED tokens are too few to show the difference.
    """
    config = model.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if not window or not slides or not getattr(config, "use_sliding_window", True):
        return
    if window < model.max_positions and window not in used:
        raise ConfigError(
            f"{name}: the sliding window of {window} tokens does not reach the attention; "
            "this architecture is not supported"
        )
