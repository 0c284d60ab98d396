"""What to build: one flat TOML file, flags before it; every key stands beside its default. Opens no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from build.trtllm import versions
from build.trtllm.modes import find_mode
from orchestrator.core.declarations import read_toml
from orchestrator.core.errors import ConfigError, shown, unknown_name
from orchestrator.deployment.config import resolved
from orchestrator.proposers.parameters import choice, flag, real, whole

QUANTISATIONS = ("none", "bf16", "fp16", "fp8", "int4_awq", "nvfp4", "int8_sq")
#: The keys that name a checkpoint.
CHECKPOINTS = ("target", "drafter")


def text(default: str) -> Any:
    """Declare free text; what it names is checked where it is looked up."""
    return field(default=default, metadata={"kind": str, "allowed": ()})


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The engines of one deployment. `load_spec` makes one; its paths are absolute, its values in range."""

    #: the model whose text is served: a checkpoint folder or a hub id; required
    target: str = text("")
    #: the draft model (method draft_model) or the heads (medusa, eagle, redrafter): folder or hub id
    drafter: str = text("")
    #: the drafting method that the target's engine is built for
    method: str = text("none")
    #: the GPU, by name; required
    gpu: str = text("")
    #: memory of one GPU in GiB; 0 = what is known of it
    gpu_memory_gib: int = whole(0, 0, 4096)
    num_gpus: int = whole(1, 1, 64)
    #: GPUs that share each layer of the target; 0 = num_gpus / pipeline_parallel
    tensor_parallel: int = whole(0, 0, 64)
    #: groups of the target's layers
    pipeline_parallel: int = whole(1, 1, 64)
    #: GPUs that share each layer of the draft model; the first ones
    drafter_tensor_parallel: int = whole(1, 1, 64)
    #: number format of the target's weights; none = the method's 16-bit format
    quantisation: str = choice(*QUANTISATIONS)
    #: number format of the draft model's weights; same = as the target's
    drafter_quantisation: str = choice("same", *QUANTISATIONS)
    #: number format of the KV caches; auto = 16 bit
    kv_cache_dtype: str = choice("auto", "fp8", "int8")
    #: sequences in one pass
    max_batch_size: int = whole(8, 1, 65536)
    #: tokens of a prompt and its text; the builder adds the draft tokens
    max_seq_len: int = whole(4096, 2, 1 << 24)
    #: tokens in one pass; 0 = what the other sizes need, 8192 at least
    max_num_tokens: int = whole(0, 0, 1 << 20)
    #: most draft tokens (nodes, of a tree) a step; 0 = the nodes of choices, else the method's default; lookahead,
    #: redrafter: worked out
    draft_len: int = whole(0, 0, 256)
    #: the tree of medusa or eagle, every node as its path of child numbers, [[0], [0, 0], [1]]; empty = the library's
    #: own, of 63 nodes
    choices: str = text("")
    #: Lookahead's W, N and G; a request may ask for less
    lookahead_window: int = whole(4, 2, 64)
    lookahead_ngram: int = whole(3, 2, 64)
    lookahead_guesses: int = whole(4, 1, 64)
    #: 0 = as many as the heads' checkpoint says, else 4
    medusa_heads: int = whole(0, 0, 16)
    #: EAGLE-1: drafter passes a step, and nodes of one layer that have children
    eagle_layers: int = whole(4, 1, 16)
    eagle_non_leaves: int = whole(10, 1, 256)
    redrafter_beams: int = whole(5, 1, 32)
    redrafter_beam_len: int = whole(5, 1, 32)
    #: share of the memory left beside weights, activations and reserve that the KV caches get
    kv_fraction: float = real(0.9, 0.05, 0.98)
    #: the draft model's share of that; 0 = both caches hold equally many tokens
    draft_kv_share: float = real(0.0, 0.0, 0.9)
    tokens_per_block: int = whole(32, 8, 256)
    #: return logits of the prompt; never with drafts
    gather_context_logits: bool = flag(False)
    #: calibration of quantised weights: data set (folder or hub id) and samples
    calib_dataset: str = text("cnn_dailymail")
    calib_size: int = whole(512, 1, 65536)
    trtllm_version: str = text(versions.DEFAULT)
    #: where the container keeps TensorRT-LLM's examples
    examples_dir: str = text("/app/examples")


def load_spec(path: Path | None, given: Mapping[str, str]) -> EngineSpec:
    """Read a spec: flags before file before default.

    path: the TOML file, or None; relative checkpoints in it start at its folder, those of flags where we are.
    given: flags {key: text}.
    Raises ConfigError: unreadable file, unknown key, wrong type, value out of range.
    """
    values: dict[str, Any] = {}
    for key, value in (read_toml(path, "engine") if path else {}).items():
        values[key] = _value(key, value, f"key {key} in {path}", Path(path or "").absolute().parent)
    for key, word in given.items():
        values[key] = _value(key, _parsed(key, word), f"flag --{key.replace('_', '-')}", Path.cwd())
    return EngineSpec(**values)


def _parsed(key: str, word: str) -> Any:
    """Return a flag's value in the key's type; what is none of that type stays text, for the check to refuse."""
    kind = _KEYS[key].metadata["kind"]
    if kind is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        return kind(word)
    except ValueError:
        return word


def _value(key: str, value: Any, where: str, folder: Path) -> Any:
    """Return `value` as `key` keeps it, else say what is allowed."""
    if key not in _KEYS:
        raise ConfigError(unknown_name("key", key, _KEYS, where))
    rules = _KEYS[key].metadata
    kind = rules["kind"]
    if kind is float and type(value) is int:
        value = float(value)
    if key == "choices" and type(value) is list:  # a plan holds it as one JSON text, the file as TOML has lists
        value = json.dumps(value)
    if type(value) is not kind:  # exact: True is no whole number
        raise ConfigError(f"{key} must be {_WORDS[kind]}, got {shown(value)} ({where})")
    if "low" in rules and not rules["low"] <= value <= rules["high"]:  # NaN never is
        raise ConfigError(f"{key} must be in {rules['low']}..{rules['high']}, got {value} ({where})")
    if rules.get("allowed") and value not in rules["allowed"]:
        raise ConfigError(unknown_name(key, value, rules["allowed"], where))
    if key == "method":
        find_mode(value, where)
    return resolved(value, folder) if key in CHECKPOINTS else value


_KEYS: dict[str, Field[Any]] = {f.name: f for f in fields(EngineSpec)}
_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
