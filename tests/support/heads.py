"""A tiny target with random heads in the published layouts, and draft calls to their engines in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from native.compiling import Unbuilt
from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse, HeadInput
from runtime.models.heads.checkpoint.load import load_head
from runtime.models.native.head_weights import unsupported_head
from runtime.models.native.heads import NativeHead
from tests.support import published_heads
from tests.support.engines import advance
from tests.support.tiny_models import TINY, VOCAB_SIZE, make_tiny_target

HIDDEN_SIZE = TINY["hidden_size"]
NUM_LAYERS = 8
DRAFT_VOCAB_SIZE = 48
SIZES = TINY | {"num_hidden_layers": NUM_LAYERS}


def make_target(folder: Path, **changes: Any) -> Path:
    """Write a tiny target of eight layers, deep enough for EAGLE-3."""
    return make_tiny_target(folder, num_hidden_layers=NUM_LAYERS, **changes)


def make_head(kind: str, folder: Path, wide: bool = False, **options: Any) -> Path:
    """Write a random head of this kind for `make_target`'s model; wide: attention heads are 16 wide, not 8."""
    sizes = SIZES | ({"num_attention_heads": 2, "num_key_value_heads": 1} if wide else {})
    if kind == "medusa":
        return published_heads.write_medusa(folder, HIDDEN_SIZE, VOCAB_SIZE, **{"num_heads": 4, **options})
    if kind == "redrafter":
        return published_heads.write_redrafter(folder, HIDDEN_SIZE, VOCAB_SIZE, **options)
    if kind == "eagle":
        return published_heads.write_eagle(folder, sizes, **options)
    return published_heads.write_eagle3(folder, sizes, **{"draft_vocab_size": DRAFT_VOCAB_SIZE, **options})


def load(kind: str, folder: Path, target: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Load a head as a deployment does."""
    return load_head(kind, str(folder), str(target), dtype, torch.device("cpu"))


def native_or_skip(head: Any) -> NativeHead:
    """Return a head in native code; skip the test if there is no compiler."""
    assert not unsupported_head(head)
    try:
        return NativeHead(head)
    except Unbuilt as error:
        pytest.skip(str(error))


def tables(target: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the target's embedding and LM head, (V, d) float64 both."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    pair = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return pair[0].detach().numpy(), pair[1].detach().numpy()


def request(
    ids: list[int],
    features: np.ndarray | None,
    *,
    start: int = 0,
    sequence_id: int = 1,
    sent: int = 0,
    sampling: Sampling | None = None,
    max_nodes: int = 60,
    max_depth: int = 4,
    width: int = 0,
    choices: TokenTree | None = None,
    min_prob: float = 0.0,
    salt: str = "",
    draws: bool = False,
    sharpness: float = 0.0,
) -> DraftRequest:
    """Return a draft call.

    features: the rows of positions start, start + 1, …. sent: how many ids the engine knows already. sampling: by
    default one under which the head ranks by log q.
    """
    rows = None if features is None else features.astype(np.float32)
    shape = choices if choices is not None else TokenTree.bare()
    head = HeadInput(rows, start, shape, width, min_prob, draws, sharpness)
    delta = delta_of(Context(ids), sent, sequence_id, salt)
    return DraftRequest(delta, sampling or Sampling(1.0, rule=Rule.REJECTION), max_nodes, max_depth, head)


def draft(engine: Any, *requests: DraftRequest) -> list[Any]:
    """Return the engine's answers to calls that come together, each a DraftResponse or an error."""
    answers, num_advances = advance(engine, *requests)
    assert num_advances == 1
    return answers


def paths_of(drafted: DraftResponse) -> list[tuple[int, ...]]:
    """Return the token path of each node."""
    return drafted.tree.paths[1:]
