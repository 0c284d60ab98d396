"""Weights of GGUF files: the values that the file defines, in transformers' order, through both forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

from orchestrator.core.errors import ConfigError
from runtime.models.gguf import read_weights
from runtime.models.heads.checkpoint.target_tables import fingerprint, read_tables
from runtime.models.load import load_model
from runtime.models.native.model import NativeModel
from runtime.models.stock import read_pretrained
from tests.support.gguf_files import finish, write_gguf
from tests.support.tiny_models import tiny_config

pytestmark = pytest.mark.unit

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_tokenizer() -> Tokenizer:
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def gguf_of(folder: Path, kind: str, family: str = "llama", **changes: Any) -> tuple[str, Any]:
    """Write a random model; return the file, and the model with the file's own values."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **WIDE | changes)).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("bias"):
                values.normal_()
    write_gguf(folder / "model.gguf", model, kind, small_tokenizer())
    return str(folder / "model.gguf"), model


@pytest.mark.parametrize(
    ("kind", "family", "changes"),
    [
        ("F32", "llama", {"tie_word_embeddings": True}),
        ("F16", "llama", {}),
        ("BF16", "llama", {"attention_bias": True, "num_key_value_heads": 4}),
        ("Q8_0", "llama", {"rope_parameters": LLAMA_3}),
        ("Q4_0", "llama", {}),
        ("Q4_1", "llama", {}),
        ("Q8_0", "qwen2", {}),
        ("Q8_0", "qwen3", {}),
    ],
)
def test_gguf_model_computes_what_the_original_with_the_file_s_values_computes(
    tmp_path: Path, kind: str, family: str, changes: dict[str, Any]
) -> None:
    file, original = gguf_of(tmp_path, kind, family, **changes)
    loaded = read_pretrained(AutoModelForCausalLM, file, dtype=torch.float32).eval()
    expected = original.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in loaded.state_dict().items())
    ids = torch.arange(1, 60)[None]
    assert torch.allclose(loaded(ids).logits, original(ids).logits, atol=1e-4)
    if kind == "Q4_1":  # the check at load compares with the stock model; both forward passes take the file
        assert [load_model(file, "cpu", "float32", kernels=name).kernels for name in ("torch", "native")] == [
            "torch",
            "native",
        ]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_are_what_native_code_multiplies(tmp_path: Path, kind: str) -> None:
    file, original = gguf_of(tmp_path, kind)
    names = [name for name, _ in original.named_parameters()]
    matrices = read_weights(file).matrices(names)
    assert {each.kind for each in matrices.values()} == {kind} and "model.embed_tokens.weight" in matrices
    for name, matrix in matrices.items():
        assert torch.equal(matrix.dequantized(), original.state_dict()[name])
    assert isinstance(model := load_model(file, "cpu", "int8", kernels="native"), NativeModel) and model.is_quantized


def test_gguf_block_whose_scale_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    file, _ = gguf_of(tmp_path, "Q8_0")
    content, block = Path(file).read_bytes(), read_weights(file).tensors["lm_head.weight"].blocks[0, :34].tobytes()
    assert content.count(block) == 1
    Path(file).write_bytes(content.replace(block, block[:1] + b"\x7c" + block[2:]))
    with pytest.raises(ConfigError, match=r"the tensor output.weight holds a scale that is no finite number"):
        load_model(file, "cpu", "int8", kernels="native")


def test_gguf_k_quants_are_dequantised(tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 60, (4, 144), np.uint8)
    writer = GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_head_count(1)
    writer.add_tensor("output.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_K)
    finish(writer)
    tensor = read_weights(str(tmp_path / "k.gguf")).tensors["lm_head.weight"]
    assert tensor.shape == (4, 256) and np.array_equal(tensor.blocks, blocks)
    assert tensor.dequantized().isfinite().all() and tensor.dequantized().std() > 0


def test_gguf_target_gives_heads_its_tables_and_a_fingerprint_that_sees_a_changed_value(tmp_path: Path) -> None:
    file, original = gguf_of(tmp_path, "Q8_0")
    tables = read_tables(file, torch.float32, torch.device("cpu"))
    assert torch.equal(tables.embedding, original.model.embed_tokens.weight)
    assert torch.equal(tables.lm_head, original.lm_head.weight)
    content = bytearray(Path(file).read_bytes())
    content[-5] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    assert len({tables.fingerprint, fingerprint(file), fingerprint(str(tmp_path / "other.gguf"))}) == 2


@pytest.mark.parametrize(
    ("name", "kind", "shape", "message"),
    [
        ("blk.0.ssm_a.weight", "F32", (2, 32), "blk.0.ssm_a.weight is none of a llama model's"),
        ("output.weight", "I32", (2, 32), "the format 26 of the tensor output.weight is not read"),
        ("output.weight", "F32", None, "does not fit the file, which may be cut"),
    ],
)
def test_gguf_weights_that_are_refused(
    tmp_path: Path, name: str, kind: str, shape: tuple[int, ...] | None, message: str
) -> None:
    file = tmp_path / "wrong.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_head_count(1)
    values = np.zeros(shape or (4096,), np.int32 if kind == "I32" else np.float32)
    writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)
    if shape is None:
        file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ConfigError, match=message):
        read_weights(str(file))


def test_float16_checkpoint_loads_with_its_exact_values(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config()).half()
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "cpu", "float32")
    assert torch.equal(loaded.model.model.embed_tokens.weight, model.model.embed_tokens.weight.float())
