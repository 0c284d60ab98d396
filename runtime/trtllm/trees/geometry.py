"""The sizes of a compiled engine, read from its config.json; opens no engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator.core.errors import ConfigError
from orchestrator.deployment.engine_manifest import Manifest
from runtime.kv.cache import CacheShape

MODE = "lookahead_decoding"
# No engine has float64, but the tests' stand-in does, so that its text can be compared exactly.
_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
# The cache is only copied here, so an integer type of the same width will do.
_QUANTISED = {"FP8": torch.uint8, "INT8": torch.int8}


@dataclass(frozen=True)
class Geometry:
    """Sizes of the engine and of one token in its KV cache.

    max_seq_len: with room for the drafts, which the builder adds. kv_dtype: of the same width as the cache's own type.
    """

    shape: CacheShape
    kv_dtype: torch.dtype
    tokens_per_block: int
    vocab_size: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_draft_len: int

    @property
    def max_blocks(self) -> int:
        """The most blocks of one sequence."""
        return -(-self.max_seq_len // self.tokens_per_block)


def read_geometry(folder: Path, manifest: Manifest) -> Geometry:
    """Read the config.json of an engine; raises ConfigError when trees cannot run on it."""
    if manifest.mode != MODE or not manifest.max_draft_len:
        raise ConfigError(
            f"the engine {folder} is built for {manifest.mode or 'no drafts'}; trees need an engine for {MODE}, "
            "whose number of tokens a step may vary (method lookahead in the engines' file)"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        return _geometry(config["pretrained_config"], config["build_config"], manifest)
    except KeyError as error:
        raise ConfigError(f"{folder / 'config.json'} has no key {error.args[0]!r} (build the engine again)") from None


def _geometry(model: dict[str, Any], build: dict[str, Any], manifest: Manifest) -> Geometry:
    plugins = build["plugin_config"]
    is_paged = plugins.get("paged_kv_cache") or str(build.get("kv_cache_type")).lower() == "paged"
    if not (plugins["remove_input_padding"] and plugins["gpt_attention_plugin"] and is_paged):
        raise ConfigError(
            "trees need an engine with remove_input_padding, gpt_attention_plugin and a paged KV cache "
            "(python -m build.trtllm builds it so)"
        )
    return Geometry(
        shape=CacheShape(model["num_hidden_layers"], model["num_key_value_heads"], model["head_size"]),
        kv_dtype=_kv_dtype(model),
        tokens_per_block=plugins["tokens_per_block"],
        vocab_size=manifest.vocab_size,
        max_batch_size=build["max_batch_size"],
        max_num_tokens=build["max_num_tokens"],
        max_seq_len=build["max_seq_len"],
        max_draft_len=build["max_draft_len"],
    )


def _kv_dtype(model: dict[str, Any]) -> torch.dtype:
    algorithm = model.get("quantization", {}).get("kv_cache_quant_algo")
    dtype: torch.dtype | None = _QUANTISED.get(algorithm) if algorithm else _DTYPES.get(model["dtype"])
    if dtype is None:
        raise ConfigError(
            f"the engine's KV cache is {algorithm or model['dtype']}; allowed: {', '.join((*_QUANTISED, *_DTYPES))}"
        )
    return dtype
