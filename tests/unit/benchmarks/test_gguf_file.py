"""The checkpoint that llama.cpp gets has the weights of the one that is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

from benchmarks.peers.gguf_file import UnsupportedCheckpoint, write_gguf
from tests.support.tiny_models import make_tiny_target


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a GGUF file by name."""
    return {tensor.name: np.asarray(tensor.data) for tensor in GGUFReader(file).tensors}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_tensor_is_written_and_only_queries_and_keys_change_their_order(tmp_path: Path, dtype: str) -> None:
    folder, file = make_tiny_target(tmp_path), tmp_path / "model.gguf"

    write_gguf(folder, file, dtype)

    found = tensors_of(file)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layer = model.model.layers[0]
    pairs = {
        "token_embd": model.model.embed_tokens,
        "output_norm": model.model.norm,
        "blk.0.attn_v": layer.self_attn.v_proj,
        "blk.0.attn_output": layer.self_attn.o_proj,
        "blk.0.ffn_down": layer.mlp.down_proj,
    }
    for name, module in pairs.items():
        expected, written = module.weight.detach(), torch.from_numpy(found[f"{name}.weight"].copy())
        if expected.ndim > 1:
            expected, written = expected.to(getattr(torch, dtype)), written.view(getattr(torch, dtype))
        assert torch.equal(written, expected)
    assert len(found) == len(set(model.state_dict()))


def test_rotation_by_neighbours_of_the_written_rows_is_rotation_by_halves_of_the_original(tmp_path: Path) -> None:
    folder, file = make_tiny_target(tmp_path), tmp_path / "model.gguf"
    write_gguf(folder, file, "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    size, heads = model.config.head_dim, model.config.num_attention_heads
    hidden, angles = torch.randn(model.config.hidden_size), torch.randn(size // 2)

    original = (model.model.layers[0].self_attn.q_proj.weight @ hidden).view(heads, size)
    by_halves = original * angles.cos().repeat(2) + rotate_half(original) * angles.sin().repeat(2)

    written = (torch.tensor(tensors_of(file)["blk.0.attn_q.weight"]) @ hidden).view(heads, size // 2, 2)
    even, odd = written.unbind(-1)
    by_neighbours = torch.stack([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()])
    torch.testing.assert_close(by_neighbours.transpose(0, 1).reshape(heads, size), by_halves, rtol=1e-5, atol=1e-6)


def test_other_families_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rope_type": "default"', '"rope_type": "linear", "factor": 2.0'))
    with pytest.raises(UnsupportedCheckpoint, match="only plain Llama"):
        write_gguf(folder, tmp_path / "model.gguf", "float32")
