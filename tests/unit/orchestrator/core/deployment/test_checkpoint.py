"""What is read of a checkpoint, and in which words a broken one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from orchestrator.core.deployment.checkpoint import Checkpoint, estimated_parameters, read_checkpoint
from orchestrator.core.errors import ConfigError
from tests.support.tiny_models import write_byte_tokenizer

CONFIG = {"vocab_size": 64, "max_position_embeddings": 512, "eos_token_id": 3}


def checkpoint(folder: Path, config: Any = CONFIG, generation: Any = None) -> Checkpoint:
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_checkpoint(str(folder))


def refusal(source: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(str(source))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_checkpoint_numbers_and_tokenizer(tmp_path: Path) -> None:
    read = checkpoint(tmp_path)
    assert (read.vocab_size, read.max_positions, read.eos_ids) == (64, 512, {3})
    assert read.tokenizer.encode("ab").ids == [1, 2]


def test_a_text_is_encoded_as_a_whole_whatever_a_training_script_left_in_the_file(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=64)
    tokenizer.enable_padding(length=300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_checkpoint(str(tmp_path)).encode("a" * 164) == [1] * 164


@pytest.mark.parametrize(
    ("config", "generation", "eos_ids"),
    [
        ({}, None, set()),
        ({"eos_token_id": None}, None, set()),
        ({"eos_token_id": 0}, None, {0}),
        ({"eos_token_id": [1, 2]}, None, {1, 2}),
        ({"eos_token_id": 1}, {}, {1}),
        ({"eos_token_id": 1}, {"eos_token_id": [2, 5]}, {2, 5}),
        ({"eos_token_id": 1}, {"eos_token_id": 0}, {0}),
    ],
)
def test_checkpoint_eos_of_the_generation_config_goes_before_the_config_s(
    tmp_path: Path, config: dict[str, Any], generation: Any, eos_ids: set[int]
) -> None:
    plain = {"vocab_size": 64, "max_position_embeddings": 512}
    assert checkpoint(tmp_path, plain | config, generation).eos_ids == eos_ids


@pytest.mark.parametrize(
    ("above", "text", "eos_ids"), [(2, None, {2}), ([2, 5], 1, {2, 5}), (None, 1, {1}), (None, None, set())]
)
def test_checkpoint_eos_beside_a_text_config(tmp_path: Path, above: Any, text: Any, eos_ids: set[int]) -> None:
    sizes = {"vocab_size": 64, "max_position_embeddings": 512}
    assert (
        checkpoint(tmp_path, {"eos_token_id": above, "text_config": sizes | {"eos_token_id": text}}).eos_ids == eos_ids
    )


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"model_type": "gpt2", "vocab_size": 64, "n_positions": 512}, (64, 512)),
        ({"model_type": "gptj", "vocab_size": 64, "n_positions": 256, "n_embd": 32, "n_head": 4}, (64, 256)),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 64}}, (262208, 131072)),
    ],
)
def test_checkpoint_numbers_that_config_json_implies_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], sizes: tuple[int, int]
) -> None:
    read = checkpoint(tmp_path, config)
    assert (read.vocab_size, read.max_positions) == sizes
    assert read.num_parameters > 0


def test_checkpoint_that_is_an_adapter_names_its_model_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}')
    said = refusal(tmp_path)
    assert "a PEFT adapter of 'owner/base', not a model; merge it" in said and "save_pretrained" in said


LLAMA_2_7B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_8B = LLAMA_2_7B | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
QWEN_3_30B_A3B = LLAMA_2_7B | {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8,
}  # fmt: skip
GPT_2 = {
    "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "vocab_size": 50257, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "share_off"),
    [
        (LLAMA_2_7B, 6.738, 0.001),
        (LLAMA_3_8B, 8.030, 0.001),
        (LLAMA_3_8B | {"num_experts_per_tok": 2, "num_local_experts": 8, "vocab_size": 32000}, 12.88, 0.001),  # Mixtral
        (QWEN_3_30B_A3B, 3.3, 0.02),
        (GPT_2, 0.124, 0.25),  # its MLP has no gate
        ({}, 0, 0),
        ({"hidden_size": "x", "num_hidden_layers": None, "vocab_size": 64}, 0, 0),
    ],
)
def test_estimated_parameters_are_those_of_the_model_card(
    config: dict[str, Any], billions: float, share_off: float
) -> None:
    assert estimated_parameters(config) / 1e9 == pytest.approx(billions, rel=share_off)


def test_checkpoint_of_a_composite_model_is_its_text_part(tmp_path: Path) -> None:
    read = checkpoint(tmp_path, {"text_config": CONFIG, "vision_config": {}})
    assert (read.vocab_size, read.eos_ids) == (64, {3})


@pytest.mark.parametrize("missing", ["vocab_size", "max_position_embeddings"])
def test_checkpoint_config_without_a_number_names_it(tmp_path: Path, missing: str) -> None:
    checkpoint(tmp_path)
    for broken in (
        {k: v for k, v in CONFIG.items() if k != missing},
        CONFIG | {missing: None},
        CONFIG | {missing: "x"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(broken))
        said = refusal(tmp_path)
        assert missing in said and "config.json" in said and str(tmp_path) in said


@pytest.mark.parametrize("text", ["{", "", "[]", "3", "null", '"x"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_checkpoint_file_that_is_no_json_object_is_named(tmp_path: Path, name: str, text: str) -> None:
    checkpoint(tmp_path)
    (tmp_path / name).write_text(text)
    assert str(tmp_path / name) in refusal(tmp_path)


def test_checkpoint_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert f"{tmp_path / 'tokenizer.json'} is not a tokenizer" in refusal(tmp_path)
