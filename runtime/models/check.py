"""The check at load, which compares our forward pass with the stock model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.tree import TokenTree
from runtime.engine.kv.batch import Pass, Segment
from runtime.engine.kv.blocks import BlockPool
from runtime.engine.kv.sequences import CachedSequence, SequenceTable
from runtime.models.causal_lm import CausalModel
from runtime.models.fused import BorrowedLinear
from runtime.models.native.model import NativeModel

NUM_CHECKED = 64
#: Rows that are also computed alone: enough to see a row's bits change, few enough for large models.
NUM_ALONE = 8


class Tolerance(NamedTuple):
    """At least `share` of the rows must be within `most` of the stock model's log p."""

    share: float
    most: float


# The stock norms round to float32, so float64 gets float32's tolerance. In bfloat16, rounding may make a router send a
# token to another expert, so a few rows of a correct model may be far off. Native products in bfloat16 are compared
# with products of the same rounded numbers; inputs that another order of sums rounds differently move log p by 0.013 at
# most on the demo target, and by 0.2 in 28 layers of large random weights.
TOLERANCE = {
    torch.float64: Tolerance(1.0, 1e-3),
    torch.float32: Tolerance(1.0, 1e-3),
    torch.bfloat16: Tolerance(0.75, 1.0),
}
NATIVE_BFLOAT16 = Tolerance(0.75, 0.5)
# Inputs in 8 bits are compared with inputs in float32: they move log p of some token by 0.6 in the median row of
# SmolLM2-135M, 30 layers, as much as another order of sums moves that of a stock model with rounded inputs.
NATIVE_INT8 = Tolerance(0.75, 2.0)


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


@contextmanager
def products_in_bfloat16(model: nn.Module) -> Iterator[None]:
    """Round the inputs of a model's products to bfloat16, as the native pass does."""

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (inputs[0].bfloat16().to(inputs[0].dtype),)

    products = [module for module in model.modules() if isinstance(module, nn.Linear | BorrowedLinear)]
    hooks = [product.register_forward_pre_hook(rounded) for product in products]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_against_stock(model: CausalModel | NativeModel, expected: Tensor, name: str) -> None:
    """Raise ConfigError when our forward pass does not reproduce the stock model.

    The first quarter of the ids is context in a pass of its own; the second is context in one pass with the drafts; the
    rest are drafts, each after a wrong sibling. So rows that read the cache, the context and the tree are all compared.
    """
    probe = _Probe(model)
    quarter, half = NUM_CHECKED // 4, NUM_CHECKED // 2
    sequence = probe.open(1, half)
    probe.forward(Segment(sequence, 0, quarter))
    second = probe.pass_of(Segment(sequence, quarter, half, probe.tree))
    logits = model.forward(second, probe.cache)[::2]
    allowed = TOLERANCE[model.dtype]
    if isinstance(model, NativeModel):
        allowed = NATIVE_INT8 if model.is_quantized else NATIVE_BFLOAT16 if model.rounds_inputs else allowed
    _check_log_probs(logits.double().log_softmax(dim=-1), expected[half - 1 :], allowed, name)
    if isinstance(model, CausalModel):  # the native pass reads the windows from the configuration
        _check_window(model, second.windows, name)


def check_bits(model: NativeModel, name: str) -> None:
    """Raise ConfigError when rows of a tree differ in any bit from the same rows computed alone, by one thread."""
    probe, half = _Probe(model), NUM_CHECKED // 2
    model.num_threads = min(2, model.max_threads)
    together = probe.forward(Segment(probe.open(1, half), 0, half, probe.tree))[::2]
    model.num_threads = 1
    alone = probe.open(2, half + NUM_ALONE)
    probe.forward(Segment(alone, 0, half - 1))
    for level in range(NUM_ALONE):
        row = probe.forward(Segment(alone, half - 1 + level, half + level))[0]
        if not torch.equal(row, together[level]):
            raise ConfigError(f"{name}: the native forward pass gives a row other bits in a tree than alone")
    model.num_threads = None


class _Probe:
    """Passes over the fixed ids with a cache of their own.

    tree: the second half of the ids as drafts after the first half, each after a wrong sibling.
    """

    def __init__(self, model: CausalModel | NativeModel) -> None:
        self._model = model
        self._ids = probe_ids(model.vocab_size)
        drafts = self._ids[NUM_CHECKED // 2 :]
        paths = [[*drafts[:level], token + wrong] for level, token in enumerate(drafts) for wrong in (1, 0)]
        self.tree = TokenTree.from_paths([[token % model.vocab_size for token in path] for path in paths])
        num_slots = 2 * (NUM_CHECKED + self.tree.num_nodes)
        self.cache = model.new_cache(1 + (num_slots * model.cache_shape.token_bytes(model.dtype) >> 20), 16)
        self._table = SequenceTable(BlockPool(self.cache.num_blocks, 16), model.max_positions, share=False)

    def open(self, sequence_id: int, length: int) -> CachedSequence:
        """Return a sequence of the first `length` ids, with slots for the tree."""
        delta = delta_of(Context(self._ids[:length]), 0, sequence_id, "")
        return self._table.open(delta, self.tree.num_nodes, NUM_CHECKED // 2)

    def pass_of(self, segment: Segment) -> Pass[Segment]:
        """Return the pass over one segment."""
        return Pass([segment], self._model.device, self._model.dtype)

    def forward(self, segment: Segment) -> Tensor:
        """Return the logits of the segment's root and nodes, (rows, V)."""
        return self._model.forward(self.pass_of(segment), self.cache)


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
    """Raise ConfigError for a family that passes its sliding window only to the mask.

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
