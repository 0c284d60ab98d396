"""What to build: one flat TOML file, whose keys flags override. It opens no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from build.trtllm import versions
from build.trtllm.modes import MODES, check_method
from orchestrator.core.declarations import Declaration, parse_text, read_toml, validate
from orchestrator.core.deployment.config import resolved
from orchestrator.core.deployment.engine_trees import lookahead_nodes, read_tree

Quantisation = Literal["none", "bf16", "fp16", "fp8", "int4_awq", "nvfp4", "int8_sq"]
#: The keys that name a checkpoint.
CHECKPOINTS = ("target", "drafter")
EAGLE = ("eagle", "eagle2")


class EngineSpec(Declaration):
    """The engines of one deployment. `load_spec` makes one; its paths are absolute, its values in range."""

    #: the model whose text is served: a checkpoint folder or a hub id; required
    target: str = ""
    #: the draft model (method draft_model) or the heads (medusa, eagle, redrafter): folder or hub id
    drafter: str = ""
    #: the drafting method that the target's engine is built for
    method: str = "none"
    #: the GPU, by name; required
    gpu: str = ""
    #: memory of one GPU in GiB; 0 = as listed in build/trtllm/gpus.py
    gpu_memory_gib: int = Field(0, ge=0, le=4096)
    num_gpus: int = Field(1, ge=1, le=64)
    #: GPUs that share each layer of the target; 0 = num_gpus / pipeline_parallel
    tensor_parallel: int = Field(0, ge=0, le=64)
    #: groups of the target's layers
    pipeline_parallel: int = Field(1, ge=1, le=64)
    #: GPUs that share each layer of the draft model; the first ones
    drafter_tensor_parallel: int = Field(1, ge=1, le=64)
    #: number format of the target's weights; none = the method's 16-bit format
    quantisation: Quantisation = "none"
    #: number format of the draft model's weights; same = as the target's
    drafter_quantisation: Literal["same", Quantisation] = "same"
    #: number format of the KV caches; auto = 16 bit; no int8, which would turn off paged context attention
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    #: sequences in one pass
    max_batch_size: int = Field(8, ge=1, le=65536)
    #: tokens of a prompt and its text; the builder adds the draft tokens
    max_seq_len: int = Field(4096, ge=2, le=1 << 24)
    #: tokens in one pass; 0 = what the other sizes need, 8192 at least
    max_num_tokens: int = Field(0, ge=0, le=1 << 20)
    #: most draft tokens (nodes, of a tree) a step; 0 = the nodes of choices, else the method's default; lookahead,
    #: redrafter: worked out
    draft_len: int = Field(0, ge=0, le=256)
    #: the tree of medusa or eagle, every node as its path of child numbers, [[0], [0, 0], [1]]; empty = the library's
    #: own, of 63 nodes
    choices: Annotated[str, BeforeValidator(lambda value: json.dumps(value) if type(value) is list else value)] = ""
    #: Lookahead's W, N and G; a request may ask for less
    lookahead_window: int = Field(4, ge=2, le=64)
    lookahead_ngram: int = Field(3, ge=2, le=64)
    lookahead_guesses: int = Field(4, ge=1, le=64)
    #: 0 = as many as the heads' checkpoint says, else 4
    medusa_heads: int = Field(0, ge=0, le=16)
    #: EAGLE-1: drafter passes a step, and nodes of one layer that have children
    eagle_layers: int = Field(4, ge=1, le=16)
    eagle_non_leaves: int = Field(10, ge=1, le=256)
    #: eagle2: children that each expanded node gets; its tree has draft_len nodes
    eagle_top_k: int = Field(10, ge=1, le=256)
    #: eagle, eagle2: epsilon of typical acceptance, for requests above temperature 0 only; 0 = greedy requests only
    eagle_posterior: float = Field(0.0, ge=0.0, lt=1.0)
    redrafter_beams: int = Field(5, ge=1, le=32)
    redrafter_beam_len: int = Field(5, ge=1, le=32)
    #: share of the memory left beside weights, activations and reserve that the KV caches get
    kv_fraction: float = Field(0.9, ge=0.05, le=0.98)
    #: the draft model's share of the KV caches' memory; 0 = both caches hold equally many tokens
    draft_kv_share: float = Field(0.0, ge=0.0, le=0.9)
    #: the sizes for which the kernels called XQA exist: 8, 16, 32, 64, 128
    tokens_per_block: int = Field(32, ge=8, le=128)
    #: calibration of quantised weights: data set (a hub id, or an absolute folder with a train.jsonl) and samples
    calib_dataset: str = "cnn_dailymail"
    calib_size: int = Field(512, ge=1, le=65536)
    trtllm_version: str = versions.DEFAULT
    #: where the container keeps TensorRT-LLM's examples
    examples_dir: str = "/app/examples"

    @property
    def max_draft_len(self) -> int:
        """The most draft tokens a step for the target's engine; 0 for the method none."""
        if self.method == "lookahead":
            return lookahead_nodes(self.lookahead_window, self.lookahead_ngram, self.lookahead_guesses)
        if self.method == "redrafter":
            return self.redrafter_beams * self.redrafter_beam_len
        default = MODES[self.method].draft_len
        return (self.draft_len or len(read_tree(self.choices)) or default) if default else 0

    @property
    def length_growth(self) -> int:
        """The tokens by which the builder lengthens max_seq_len: the drafts, and EAGLE's layers."""
        return self.max_draft_len + (self.eagle_layers if self.method in EAGLE else 0)


def load_spec(path: Path | None, flags: Mapping[str, str]) -> EngineSpec:
    """Read a spec; a flag overrides the file, and the file overrides the default.

    path: the TOML file, or None; checkpoint paths in it are relative to its folder, those in flags to the working
    folder. flags: {key: text}.
    Raises ConfigError for an unreadable file, an unknown key, a wrong type or a value out of range.
    """
    content = read_toml(path, "engine") if path else {}

    def where(key: str) -> str:
        return f"flag --{key.replace('_', '-')}" if key in flags else f"key {key} in {path}"

    parsed = {key: parse_text(EngineSpec, key, word) for key, word in flags.items()}
    spec = validate(EngineSpec, content | parsed, where)
    check_method(spec.method, where("method"))
    folders = {key: Path.cwd() if key in flags else Path(path or "").absolute().parent for key in CHECKPOINTS}
    paths = {key: resolved(getattr(spec, key), folder, where(key)) for key, folder in folders.items()}
    return spec.model_copy(update=paths)
