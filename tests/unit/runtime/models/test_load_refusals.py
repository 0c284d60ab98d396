"""Checkpoints that cannot be served say what is wrong with the file and what to do instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from orchestrator.core.context import Context
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import ConfigError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.sampling_params import Sampling
from runtime.engine.build_engines import no_caller
from runtime.engine.torch_engine import build_draft, load_draft
from runtime.models.load import load_model
from tests.support.engines import ask
from tests.support.tiny_models import make_tiny_target

pytestmark = pytest.mark.unit


def changed(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(str(folder), "cpu", "float32")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantized_weights_name_their_method_and_what_to_serve_instead(tmp_path: Path, method: str) -> None:
    make_tiny_target(tmp_path)
    changed(tmp_path, quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True})
    said = refusal(tmp_path)
    assert f"the weights are quantized ({method}" in said and "serve the original weights, or a GGUF file" in said


def test_resized_embeddings_name_the_tensor_both_shapes_and_the_key(tmp_path: Path) -> None:
    make_tiny_target(tmp_path)
    changed(tmp_path, vocab_size=70)
    said = refusal(tmp_path)
    assert "is [64, 32] in the weights and [70, 32] by config.json" in said and "set vocab_size" in said


def test_short_context_is_refused_with_the_least_that_is_needed(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, max_position_embeddings=64)
    assert "context is 64 tokens (max_position_embeddings in config.json), at least 72 are needed" in refusal(tmp_path)


def draft_of(folder: Path, rows: int, family: str = "llama") -> tuple[Any, list[int]]:
    """Return a draft model with this many rows for a target of 64, and its greedy draft after token 5."""
    make_tiny_target(folder / "target")
    make_tiny_target(folder / "draft", family, seed=4, vocab_size=rows, num_attention_heads=2, num_key_value_heads=2)
    config = ServingConfig(target=str(folder / "target"), draft=str(folder / "draft"), kv_memory_mb=16)
    thread, model = build_draft(config, no_caller)
    try:
        request = DraftRequest(delta_of(Context([5, 63]), 0, 1, "t"), Sampling(), 8, 8)
        drafted = ask(thread, request)
    finally:
        thread.close()
    return model, drafted.tree.tokens.tolist()


@pytest.mark.parametrize("rows", [64, 60, 80])
def test_draft_model_with_padded_tables_drafts_ids_of_the_target_alone(tmp_path: Path, rows: int) -> None:
    model, tokens = draft_of(tmp_path, rows)
    assert model.vocab_size == 64
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
    ids = [5, min(63, rows - 1)]
    for token in tokens:
        with torch.inference_mode():
            logits = stock(torch.tensor([ids])).logits[0, -1, :64]
        assert token == int(logits.argmax())
        ids.append(token)


def test_draft_model_of_another_tokenizer_is_refused_naming_both(tmp_path: Path) -> None:
    make_tiny_target(tmp_path / "target")
    make_tiny_target(tmp_path / "draft")
    file = tmp_path / "draft/tokenizer.json"
    document = json.loads(file.read_text())
    document["model"]["vocab"] |= {"a": 2, "b": 1}
    file.write_text(json.dumps(document))
    config = ServingConfig(target=str(tmp_path / "target"), draft=str(tmp_path / "draft"))
    with pytest.raises(ConfigError) as caught:
        load_draft(config)
    said = str(caught.value)
    assert f"{tmp_path}/draft has another tokenizer than the target {tmp_path}/target" in said and "(key draft" in said
