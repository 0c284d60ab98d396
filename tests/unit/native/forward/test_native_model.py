"""The native forward pass: equal to the stock model, and bit for bit the same whatever shares the pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from native import compiling, library
from native.compiling import Unbuilt
from orchestrator.core.context import Context
from orchestrator.core.errors import ConfigError, EngineError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import HiddenStates
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel
from runtime.models.causal_lm import CausalModel
from runtime.models.check import products_in_bfloat16
from runtime.models.load import load_model
from runtime.models.native import model as native_model
from runtime.models.native.model import NativeModel
from runtime.models.quantized import linears, quantize_linears
from tests.unit.runtime.models.test_families import FAMILIES, LLAMA3_ROPE, SLIDING_FULL, WINDOW, Stock, write_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 16, "num_hidden_layers": 7, "initializer_range": 0.2}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
ALTERNATING = (4 * SLIDING_FULL[:2])[:7]
NATIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama:llama3": {"rope_parameters": LLAMA3_ROPE},
    "llama:one-key-head": {"num_key_value_heads": 1},
    "llama:wide-heads": {"head_dim": 96},
    "llama:whole-blocks": {"intermediate_size": 96, "head_dim": 32},
    "qwen2": {"hidden_size": 64, "head_dim": None},
    "qwen2:sliding": FAMILIES["qwen2:sliding"] | {"head_dim": None},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "head_dim": None, "hidden_size": 64},
    "phi3:partial": {"head_dim": None, "hidden_size": 64, "rope_parameters": PARTIAL_ROPE},
    "gemma": {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": FAMILIES["gemma2"] | {"head_dim": 32, "layer_types": ALTERNATING},
    "gemma2:256": FAMILIES["gemma2"] | {"head_dim": 256, "layer_types": ALTERNATING},
    "gemma3_text": FAMILIES["gemma3_text"] | {"head_dim": 64, "layer_types": ALTERNATING},
}
BOTH = HiddenStates.LAST | HiddenStates.LAYERS
#: Families whose products are tested with rounded inputs, too; int8 leaves some matrices of all but one as they are.
ROUNDED = ("llama:llama3", "llama:whole-blocks", "phi3", "gemma2:256")
CASES = [(family, "float32") for family in NATIVE]
CASES += [(family, dtype) for family in ROUNDED for dtype in ("bfloat16", "int8")]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    try:
        library.load()
    except Unbuilt as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, dtype = request.param
    return family, dtype


@pytest.fixture(scope="module")
def folder(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {name: value for name, value in {**SIZES, **NATIVE[case[0]]}.items() if value is not None}
    return write_checkpoint(tmp_path_factory.mktemp("native"), case[0].partition(":")[0], **changes)


@pytest.fixture(scope="module")
def model(case: tuple[str, str], folder: Path) -> NativeModel:
    loaded = load_model(str(folder), "cpu", case[1], BOTH, kernels="native")
    assert isinstance(loaded, NativeModel)
    return loaded


@pytest.fixture
def paged(model: NativeModel) -> Iterator[PagedModel]:
    model.num_threads = 1
    yield PagedModel(model, 8, 4, share=False)


def rounded_inputs(inputs: torch.Tensor) -> torch.Tensor:
    """The inputs of products as int8 has them: 32 share the scale max |x| ÷ 127."""
    blocks = inputs.unflatten(-1, (-1, 32))
    most = blocks.abs().amax(dim=-1, keepdim=True)
    return ((blocks * (127 / most)).nan_to_num(nan=0.0).round() * (most / 127)).flatten(-2)


@contextmanager
def rounded(stock: Any, dtype: str) -> Iterator[None]:
    """Round a stock model's weights, for good, and the inputs of its products as the native pass does."""
    if dtype == "bfloat16":
        for weight in stock.parameters():
            weight.data = weight.data.bfloat16().to(weight.dtype)
        with products_in_bfloat16(stock):
            yield
        return
    quantized = quantize_linears(stock) if dtype == "int8" else {}
    for weight in stock.parameters():
        if id(weight) in quantized:
            weight.data = quantized[id(weight)].dequantized().to(weight.dtype)
    products = [module for module in linears(stock) if id(module.weight) in quantized]
    hooks = [each.register_forward_pre_hook(lambda _, inputs: (rounded_inputs(inputs[0]),)) for each in products]
    yield
    for hook in hooks:
        hook.remove()


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


def random_tree(num_nodes: int, seed: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    taken: set[tuple[int, int]] = set()
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < num_nodes:
        token, parent = int(rng.integers(64)), int(rng.integers(len(tokens) + 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def open_segment(paged: PagedModel, sequence_id: int, ids: list[int], tree: TokenTree) -> Segment:
    sequence = paged.sequences.open(delta_of(Context(ids), 0, sequence_id, ""), tree.num_nodes, int(tree.depths.max()))
    return Segment(sequence, 0, len(ids), tree)


def logits_alone(paged: PagedModel, ids: list[int]) -> torch.Tensor:
    """The logits after `ids`, computed one token a pass as plain decoding does; (V,)."""
    sequence = paged.sequences.open(delta_of(Context(ids), 0, 99, ""), 0, 0)
    for place in range(len(ids)):
        logits = paged.forward([Segment(sequence, place, place + 1)])
    paged.sequences.drop(99)
    return logits[0]


def path_to(tree: TokenTree, node: int) -> list[int]:
    path: list[int] = []
    while node:
        path.insert(0, int(tree.tokens[node - 1]))
        node = int(tree.parents[node - 1])
    return path


def test_a_tree_behind_a_long_context_equals_the_stock_model(
    case: tuple[str, str], folder: Path, paged: PagedModel
) -> None:
    ids, tree, stock = random_ids(3 * WINDOW), random_tree(9, 1), Stock(folder)
    logits = paged.forward([open_segment(paged, 1, ids, tree)]).log_softmax(-1)
    with rounded(stock.model, case[1]):
        expected = [stock.logits([*ids, *path_to(tree, node)]) for node in range(tree.num_nodes + 1)]
    error = (logits - torch.from_numpy(np.array(expected)).log_softmax(-1)).abs().max()
    assert error < (1e-4 if case[1] == "float32" else 0.3)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_row_has_the_bits_of_plain_decoding(paged: PagedModel, num_threads: int) -> None:
    """Other sequences in the pass, scattered blocks, tiles of all sizes and several threads change no bit."""
    lengths, sizes = (1, 7, 3 * WINDOW), (12, 0, 37)
    contexts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    trees = [random_tree(size, seed) for seed, size in enumerate(sizes)]
    expected = [
        [logits_alone(paged, [*ids, *path_to(tree, node)]) for node in range(tree.num_nodes + 1)]
        for ids, tree in zip(contexts, trees, strict=True)
    ]
    paged.model.num_threads = num_threads  # type: ignore[attr-defined]
    for order in itertools.permutations(range(3)):
        segments = [open_segment(paged, 1 + index, contexts[index], trees[index]) for index in order]
        logits = paged.forward(segments)
        rows = [row for index in order for row in expected[index]]
        assert torch.equal(logits, torch.stack(rows))
        for index in order:
            paged.sequences.drop(1 + index)


def test_a_prompt_in_parts_leaves_the_bits_of_one_pass(paged: PagedModel) -> None:
    ids = random_ids(40)
    whole = paged.forward([open_segment(paged, 1, ids, TokenTree.bare())])
    sequence = open_segment(paged, 2, ids, TokenTree.bare()).sequence
    paged.forward([Segment(sequence, 0, 13)])
    paged.forward([Segment(sequence, 13, 14)])
    assert torch.equal(paged.forward([Segment(sequence, 14, 40)]), whole)


def test_hidden_states_are_those_of_the_stock_model(case: tuple[str, str], folder: Path, paged: PagedModel) -> None:
    ids, stock = random_ids(20), Stock(folder).model
    with torch.inference_mode(), rounded(stock, case[1]):
        states = stock(torch.tensor([ids]), output_hidden_states=True).hidden_states
    segment = open_segment(paged, 1, ids, TokenTree.bare())
    paged.forward([segment])
    kept = paged.cache.features[[segment.sequence.slot(i) for i in range(20)]]
    expected = torch.cat([states[-1][0], *(states[layer][0] for layer in (2, 3, 4))], dim=-1)
    assert (kept - expected).abs().max() < (1e-4 if case[1] == "float32" else 0.05 * expected.abs().max())


BAD: list[tuple[str, int, int, str]] = [
    ("ids", 0, 64, "ids: a token outside the vocabulary"),
    ("ids", 0, -1, "ids: a token outside the vocabulary"),
    ("segments", 0, -1, "segments: no tokens"),
    ("segments", 0, 5, "segments: no tokens"),
    ("segments", 0, 1, "segments: another number of rows than ids"),
    ("segments", 1, 2**31 - 1, "segments: no tokens"),
    ("segments", 1, 99, "segments: more tokens than slots"),
    ("segments", 2, -1, "segments: more nodes than parents"),
    ("segments", 2, 3, "segments: more nodes than parents"),
    ("segments", 3, 0, "segments: more tokens than slots"),
    ("segments", 3, 99, "segments: another number of nodes or blocks"),
    ("blocks", 0, -1, "blocks: a block outside the cache"),
    ("blocks", 0, 10**6, "blocks: a block outside the cache"),
    ("parents", 0, 1, "parents: a parent that does not come before its child"),
    ("parents", 1, -1, "parents: a parent that does not come before its child"),
]


@pytest.mark.parametrize("case", CASES[:1], indirect=True, ids="-".join)
@pytest.mark.parametrize(("name", "place", "value", "words"), BAD)
def test_a_number_that_leads_outside_an_array_is_refused(
    paged: PagedModel, monkeypatch: pytest.MonkeyPatch, name: str, place: int, value: int, words: str
) -> None:
    segment = open_segment(paged, 1, random_ids(5), TokenTree.chain([1, 2]))
    describe = native_model.PassIntegers

    def bad(*arguments: Any) -> native_model.PassIntegers:
        integers = describe(*arguments)
        getattr(integers, name)[place] = value
        return integers

    monkeypatch.setattr(native_model, "PassIntegers", bad)
    with pytest.raises(EngineError, match=words):
        paged.forward([segment])


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which the library cannot be built."""
    monkeypatch.setattr(compiling, "FLAGS", ("--no-such-flag",))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_a_library_that_cannot_be_built_leaves_the_model_to_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, "llama", **SIZES)
    assert isinstance(load_model(str(folder), "cpu", "float32", kernels="auto"), CausalModel)
    assert "torch computes this model" in caplog.text and "failed" in caplog.text


def test_a_model_that_native_code_lacks_is_left_to_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    folder = write_checkpoint(tmp_path, "olmo2", **FAMILIES["olmo2"])
    assert isinstance(load_model(str(folder), "cpu", "float32", kernels="auto"), CausalModel)
    assert "the family 'olmo2' (it has llama, mistral, qwen2, qwen3, phi3, gemma" in caplog.text


@pytest.mark.parametrize(
    ("family", "device", "dtype", "reason"),
    [
        ("olmo2", "cpu", "float32", r"it does not support the family 'olmo2'"),
        ("llama", "cpu", "float64", r"it does not support torch\.float64 on cpu"),
        ("llama", "cuda:1", "float32", r"it runs on a CPU, not on cuda:1"),
    ],
)
def test_a_deployment_that_wants_native_code_is_refused_with_what_native_code_lacks(
    tmp_path: Path, family: str, device: str, dtype: str, reason: str
) -> None:
    folder = write_checkpoint(tmp_path, family, **FAMILIES.get(family, SIZES))
    with pytest.raises(ConfigError, match=rf"kernels = 'native', but native code cannot compute it: {reason}"):
        load_model(str(folder), device, dtype, kernels="native")


def test_a_native_pass_whose_bits_depend_on_the_threads_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, "llama", **SIZES)
    forward = NativeModel.forward

    def unsteady(model: NativeModel, *arguments: Any) -> torch.Tensor:
        return forward(model, *arguments) * (1.0 + 1e-7 * (model.num_threads == 2))

    monkeypatch.setattr(NativeModel, "forward", unsteady)
    assert isinstance(load_model(str(folder), "cpu", "float32", kernels="auto"), CausalModel)
    assert "gives a row other bits in a tree than alone" in caplog.text


def test_a_native_pass_that_differs_from_the_stock_model_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, "llama", **SIZES)
    monkeypatch.setattr(native_model, "norm_weight", lambda norm, family: 1.01 * norm.weight)
    assert isinstance(load_model(str(folder), "cpu", "float32", kernels="auto"), CausalModel)
    assert "differ from the stock model" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_weights_and_the_inputs_of_products_are_rounded(tmp_path: Path, dtype: str) -> None:
    """The result is far nearer to the stock model, rounded in the same way, than to float32's."""
    folder = write_checkpoint(tmp_path, "llama", **{**SIZES, **NATIVE["llama:whole-blocks"], "num_hidden_layers": 1})
    ids = random_ids(20)
    logits = {}
    for each in ("float32", dtype):
        paged = PagedModel(load_model(str(folder), "cpu", each, kernels="native"), 8, 16)
        logits[each] = paged.forward([open_segment(paged, 1, ids, TokenTree.bare())])[0]
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode(), rounded(stock, dtype):
        expected = stock(torch.tensor([ids])).logits[0, -1]
    rounding = (logits["float32"] - logits[dtype]).abs().max()
    assert (logits[dtype] - expected).abs().max() < 0.1 * rounding


@pytest.mark.parametrize("device, kernels", [("cpu", "torch"), ("cuda", "auto")])
def test_int8_is_never_computed_by_torch(tmp_path: Path, device: str, kernels: Literal["torch", "auto"]) -> None:
    folder = write_checkpoint(tmp_path, "llama", **SIZES)
    with pytest.raises(ConfigError, match=r"int8.* native code alone|it runs on a CPU, not on cuda"):
        load_model(str(folder), device, "int8", kernels=kernels)
