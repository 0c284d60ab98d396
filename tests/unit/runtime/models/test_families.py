"""Model families: a tree is answered as by the stock model, or the checkpoint refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import runtime.engine.kv.batch
import runtime.models.attention
import runtime.models.check
from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import HiddenStates
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel
from runtime.models.fused import fuse_norms
from runtime.models.load import load_model
from tests.support.engines import node_paths
from tests.support.tiny_models import VOCAB_SIZE, tiny_config

RNG = np.random.default_rng(12)
WINDOW = 12
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
SLIDING_FULL = ["sliding_attention", "full_attention", "sliding_attention"]

# Contexts are longer than WINDOW. What makes each family another one stands beside it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama:llama3": {"rope_parameters": LLAMA3_ROPE},
    "qwen2": {},  # biases
    "qwen2:sliding": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},  # norms of queries and keys; heads wider than hidden_size / heads
    "mistral": {"sliding_window": WINDOW},
    "gemma2": GEMMA | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "layer_types": SLIDING_FULL},
    "gemma3_text": GEMMA | {"sliding_window": WINDOW, "layer_types": SLIDING_FULL},  # two ropes, 1 + weight
    "phi3": {"sliding_window": WINDOW},  # one projection for queries, keys and values
    "olmo2": {},  # norms after the blocks
    "qwen3_moe": MOE | {"head_dim": 8, "num_experts": 4},  # experts
    "gpt_oss": MOE | {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4},  # sinks, yarn
}


def write_checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """A random checkpoint whose norms, biases and sinks are random too (transformers begins with 0 or 1)."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(folder)
    return folder


def write_config(folder: Path, family: str, **changes: Any) -> Path:
    """A checkpoint without weights: what is refused for its configuration is refused before they are read."""
    tiny_config(family, **changes).save_pretrained(folder)
    return folder


class Stock:
    """The stock model's own forward pass, with its two roundings to float32 (norms, attention's softmax) lifted."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        fuse_norms(self.model)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> np.ndarray:
        softmax = torch.nn.functional.softmax

        def exact(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
            # Scores have four dimensions; a router's logits have two, and its rounding is the engine's too.
            return softmax(x, dim=dim, dtype=None if x.ndim == 4 else dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "softmax", exact)
            return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].numpy()


def random_ids(length: int) -> list[int]:
    return RNG.integers(1, VOCAB_SIZE, length).tolist()


def random_tree(num_nodes: int) -> TokenTree:
    parents = [int(RNG.integers(max(node - 3, 0), node + 1)) for node in range(num_nodes)]
    return TokenTree(RNG.permutation(VOCAB_SIZE)[:num_nodes].astype(np.int32), np.array(parents, np.int32))


def segment_of(paged: PagedModel, sequence_id: int, ids: list[int], tree: TokenTree) -> Segment:
    delta = delta_of(Context(ids), 0, sequence_id, "")
    sequence = paged.sequences.open(delta, tree.num_nodes, int(tree.depths.max()))
    return Segment(sequence, sequence.num_computed, len(ids), tree)


@pytest.mark.parametrize("name", FAMILIES)
def test_trees_over_long_contexts_equal_the_stock_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences: one whose context is half in the cache, one that comes whole; both with trees.

    They attend each alone, as on a CPU, and in a group, as on a GPU.
    """
    folder = write_checkpoint(tmp_path, name.partition(":")[0], **FAMILIES[name])
    paged = PagedModel(load_model(str(folder), "cpu", "float64"), memory_mb=4, block_tokens=4)
    stock = Stock(folder)
    known, fresh = random_ids(4 * WINDOW), random_ids(2 * WINDOW + 1)
    paged.forward([segment_of(paged, 1, known[: 2 * WINDOW + 3], TokenTree.bare())])
    segments = [segment_of(paged, 1, known, random_tree(7)), segment_of(paged, 2, fresh, random_tree(6))]
    assert segments[0].first == 2 * WINDOW + 3
    paths = [path for s in segments for path in node_paths(s.sequence.ids, s.tree)]
    truth = np.stack([stock.logits(path) for path in paths])
    assert np.abs(truth).max() > 0.1
    for joins in (False, True):
        monkeypatch.setattr(runtime.engine.kv.batch, "joins", lambda device, joins=joins: joins)
        assert np.abs(paged.forward(segments).numpy() - truth).max() <= 1e-10


# bfloat16 stands for the default dtype of real deployments: norms, packed products and caches in 8 bits.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ("llama", "gemma2", "gpt_oss", "qwen3_moe") for dtype in ("float32", "bfloat16")],
)
def test_other_dtypes_load(name: str, dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, name, **FAMILIES[name] | {"initializer_range": 0.2})
    model = load_model(str(folder), "cpu", dtype)
    assert model.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("family", ["phi", "llama", "gemma2"])
def test_states_after_the_final_norm_are_found_whatever_it_is_called(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family, **FAMILIES.get(family, {"num_key_value_heads": 4}))
    paged = PagedModel(load_model(str(folder), "cpu", "float64", HiddenStates.LAST), memory_mb=4, block_tokens=4)
    ids = random_ids(9)
    segment = segment_of(paged, 1, ids, TokenTree.bare())
    paged.forward([segment])
    stock = Stock(folder).model
    with torch.inference_mode():
        truth = stock.get_decoder()(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    slots = [segment.sequence.slot(i) for i in range(9)]
    assert torch.allclose(paged.cache.features[slots], truth, rtol=1e-4, atol=1e-4)


class PlusOneRMSNorm(torch.nn.Module):
    """A Gemma norm: 1 + weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(weight), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


@pytest.mark.parametrize("size", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_norm_is_replaced_by_its_own_kind(dtype: torch.dtype, size: float) -> None:
    """Where weights are large, 1 + weight is within bfloat16's tolerance of weight; the nearer one it must be."""
    torch.manual_seed(1)
    weight = (torch.full((64,), size) + torch.randn(64) * 0.1).to(dtype)
    model = torch.nn.Sequential(PlusOneRMSNorm(weight))
    x = torch.randn(5, 64, dtype=dtype)
    truth = model(x)
    fuse_norms(model)
    assert isinstance(model[0], torch.nn.RMSNorm)
    error = (model(x) - truth).double().norm() / truth.double().norm()
    assert error < {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 0.005}[dtype]


REFUSED_BY_CONFIG = {
    "dynamic": ("llama", {"rope_parameters": DYNAMIC_ROPE}),
    "longrope": ("phi3", {"rope_parameters": LONGROPE}),
    "linear_attention": ("qwen3_next", {}),
    "chunked_attention": ("llama4_text", {}),
    "conv": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
}


@pytest.mark.parametrize("reason", REFUSED_BY_CONFIG)
def test_a_configuration_that_cannot_be_exact_is_refused(reason: str, tmp_path: Path) -> None:
    family, changes = REFUSED_BY_CONFIG[reason]
    with pytest.raises(ConfigError, match=f"'{reason}'"):
        load_model(str(write_config(tmp_path, family, **changes)), "cpu", "float64")


REFUSED_BY_ARCHITECTURE: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLmForCausalLM does not let its attention be replaced", {}),
    "gptj": ("GPTJForCausalLM does not let its attention be replaced", {"rotary_dim": 4}),  # nor knows sdpa
    "diffllama": ("not supported", {}),  # asks for attention twice a layer, with other values each time
    "nemotron": ("not supported", {}),  # keeps the pass from its attention
    "deepseek_v3": ("not supported", {"num_key_value_heads": 4}),  # compressed keys
    "qwen2_moe": (  # says its window to the mask alone; 64 tokens would not show it
        "sliding window of 100",
        MOE
        | {"num_experts": 4, "shared_expert_intermediate_size": 16}
        | {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 3},
    ),
}


@pytest.mark.parametrize("family", REFUSED_BY_ARCHITECTURE)
def test_an_architecture_that_cannot_be_exact_is_refused(family: str, tmp_path: Path) -> None:
    reason, changes = REFUSED_BY_ARCHITECTURE[family]
    write_checkpoint(tmp_path, family, **changes)
    with pytest.raises(ConfigError, match=reason):
        load_model(str(tmp_path), "cpu", "float64")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"model_type": "none_such"}', "\x00\xff"])
def test_a_broken_config_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        load_model(str(tmp_path), "cpu", "float64")


@pytest.mark.parametrize("damage", ["absent", "cut short", "incomplete"])
def test_broken_weights_are_refused(tmp_path: Path, llama: Path, damage: str) -> None:
    """Above all those that lack a tensor: transformers would make up random ones."""
    from safetensors.torch import load_file, save_file

    weights = llama / "model.safetensors"
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    if damage == "cut short":
        (tmp_path / "model.safetensors").write_bytes(weights.read_bytes()[:-1000])
    if damage == "incomplete":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="up_proj" if damage == "incomplete" else str(tmp_path)):
        load_model(str(tmp_path), "cpu", "float64")


def scaled(query: Any, key: Any, value: Any, bias: Any, scaling: float, *rest: Any) -> Any:
    return ATTEND(query, key, value, bias, scaling * 1.05, *rest)


def unmasked(query: Any, key: Any, value: Any, bias: Any, *rest: Any) -> Any:
    return ATTEND(query, key, value, None, *rest)


def without_cache(query: Any, key: Any, value: Any, bias: Any, *rest: Any) -> Any:
    """Rows of earlier passes are not found."""
    rows = query.shape[2] // 2
    first = key.shape[2] - rows
    if first <= 0:
        return ATTEND(query, key, value, bias, *rest)
    key = torch.cat([torch.zeros_like(key[:, :, :first]), key[:, :, first:]], dim=2)
    return ATTEND(query, key, value, bias, *rest)


def siblings_seen(query: Any, key: Any, value: Any, bias: Any, *rest: Any) -> Any:
    """Nodes see all that stands before them in the row, as in a chain."""
    rows = query.shape[2] // 2
    causal = torch.ones(rows, key.shape[2], dtype=torch.bool).tril(key.shape[2] - rows)
    mask = torch.zeros(causal.shape, dtype=key.dtype).masked_fill(~causal, -torch.inf).repeat(2, 1)
    return ATTEND(query, key, value, mask, *rest)


ATTEND = runtime.models.attention._attend


@pytest.fixture(scope="module")
def sharp_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose tokens depend on their context as much as a trained model's do."""
    return write_checkpoint(tmp_path_factory.mktemp("sharp"), "llama", initializer_range=0.2)


@pytest.mark.parametrize(
    ("dtype", "bug"),
    [("float64", bug) for bug in (scaled, unmasked, without_cache, siblings_seen)]
    + [("bfloat16", bug) for bug in (unmasked, without_cache, siblings_seen)],
)
def test_a_model_that_differs_from_the_stock_one_is_refused(
    sharp_llama: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bug: Any
) -> None:
    """What the comparison at load is for; each bug shows itself in another of its rows."""
    load_model(str(sharp_llama), "cpu", dtype)
    monkeypatch.setattr(runtime.models.attention, "_attend", bug)
    with pytest.raises(ConfigError, match="differ from the stock model by"):
        load_model(str(sharp_llama), "cpu", dtype)
