"""`python -m build.trtllm.llm_api`: a folder for engine = "llm_api", and the command of `trtllm-serve --grpc` for it.

It reads the file of the compiled engines, and ignores the keys that only those have, the GPU above all. The draft
length and all else here are fixed when trtllm-serve starts: a request cannot choose.
EXPERIMENTAL: names are checked against NVIDIA's published contract; no server has been started with one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from build.trtllm.engines import LEAST_NUM_TOKENS
from build.trtllm.modes import MODES, MOST_NODES
from build.trtllm.record import copy_small_files
from build.trtllm.spec import CHECKPOINTS, EngineSpec
from build.trtllm.versions import LLM_DEFAULT, find_llm_release
from orchestrator.core.declarations import Declaration, read_toml, validate
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import resolved
from orchestrator.core.deployment.engine_manifest import LlmManifest
from orchestrator.core.errors import ConfigError, unknown_name

#: The file of options beside llm_api.json; JSON is YAML.
OPTIONS = "options.yaml"


class LlmApiSpec(Declaration):
    """What the LLM API runs; EngineSpec describes the keys that compiled engines share."""

    #: the drafting method: one of the server's, or one that only TensorRT-LLM has (mtp, pard, dflash)
    method: str = "none"
    target: str = ""
    #: checkpoint of the draft model or head (draft_model, eagle3, pard, dflash); empty for the other methods
    drafter: str = ""
    num_gpus: int = Field(1, ge=1, le=64)
    #: GPUs that share each layer; 0 = num_gpus
    tensor_parallel: int = Field(0, ge=0, le=64)
    max_batch_size: int = Field(8, ge=1, le=65536)
    #: tokens of prompt and text
    max_seq_len: int = Field(4096, ge=2, le=1 << 24)
    #: draft tokens a step; 0 = the method's default
    draft_len: int = Field(0, ge=0, le=MOST_NODES)
    #: longest n-gram that prompt_lookup looks for
    max_ngram: int = Field(3, ge=1)
    #: requests share KV blocks; false serves requests with a cache_salt, too
    block_reuse: bool = True
    #: requests above temperature 0 beside drafts
    sampling: bool = False
    trtllm_version: str = LLM_DEFAULT


@dataclass(frozen=True)
class _Kind:
    """One method by its decoding_type. draft_len: the default, which for heads is our choice."""

    decoding_type: str
    draft_len: int = 4
    has_drafter: bool = False
    overlaps: bool = True


_KINDS = {
    "draft_model": _Kind("Draft_Target", MODES["draft_model"].draft_len, has_drafter=True, overlaps=False),
    "eagle3": _Kind("Eagle3", has_drafter=True),
    "mtp": _Kind("MTP", 1),
    "pard": _Kind("PARD", has_drafter=True),
    "dflash": _Kind("DFlash", has_drafter=True),
    "prompt_lookup": _Kind("NGram", MODES["prompt_lookup"].draft_len, overlaps=False),
    "suffix": _Kind("SA", MODES["suffix"].draft_len),
}
_COMPILED = "its type is for compiled engines only (python -m build.trtllm)"
_NO_TYPE = "the LLM API has no decoding type for it"
_REFUSED = {
    "medusa": _COMPILED,
    "lookahead": _COMPILED,
    "eagle": f"the PyTorch backend runs EAGLE-3 (method eagle3); EAGLE-1: {_COMPILED}",
    "eagle2": "the PyTorch backend runs EAGLE-3 (method eagle3)",
    "redrafter": _NO_TYPE,
    "ngram": f"{_NO_TYPE}; its NGram looks up the prompt (method prompt_lookup)",
    "jacobi": _NO_TYPE,
    "recycling": _NO_TYPE,
    "predicted": _NO_TYPE,
    "auto": "it chooses among the drafts of this server at each step",
}


def speculative_config(spec: LlmApiSpec) -> dict[str, Any]:
    """Return the speculative_config of a spec, {} for the method none; raises ConfigError, with the reason."""
    if spec.method == "none":
        _check_drafter(spec, False)
        return {}
    if spec.method in _REFUSED:
        raise ConfigError(f"method {spec.method!r} is not for the LLM API: {_REFUSED[spec.method]} (key method)")
    if spec.method not in _KINDS:
        raise ConfigError(unknown_name("method", spec.method, _KINDS, "key method"))
    kind = _KINDS[spec.method]
    _check_drafter(spec, kind.has_drafter)
    config: dict[str, Any] = {"decoding_type": kind.decoding_type, "max_draft_len": spec.draft_len or kind.draft_len}
    if kind.has_drafter:
        config["speculative_model"] = spec.drafter
    if spec.method == "prompt_lookup":
        # By default all requests share a pool: from timing and drafts, a client could infer other clients' texts.
        config |= {"max_matching_ngram_size": spec.max_ngram, "is_public_pool": False}
    if spec.sampling:  # otherwise sampled requests are drawn greedily beside drafts
        config["allow_advanced_sampling"] = True
    return config


def _check_drafter(spec: LlmApiSpec, has_drafter: bool) -> None:
    if bool(spec.drafter) is not has_drafter:
        rule = "name a checkpoint" if has_drafter else "be empty"
        raise ConfigError(f"drafter must {rule} for method {spec.method}, got {spec.drafter!r} (key drafter)")


# These keys would change the model, but the LLM API serves a checkpoint as it is, quantised or not.
_COMPILED_KEYS = ("quantisation", "drafter_quantisation", "kv_cache_dtype")


def load_llm_spec(file: Path) -> LlmApiSpec:
    """Read the engines' file; raises ConfigError if it is unreadable, a key or value is wrong, or target is missing."""
    content = read_toml(file, "engine")
    for key in _COMPILED_KEYS:
        if content.get(key, "none") not in ("none", "same", "auto"):
            raise ConfigError(
                f"{key} is for compiled engines; the LLM API takes the checkpoint as it is (key {key} in {file})"
            )
    compiled_only = EngineSpec.model_fields.keys() - LlmApiSpec.model_fields.keys()
    values = {key: value for key, value in content.items() if key not in compiled_only}

    def where(key: str) -> str:
        return f"key {key} in {file}"

    spec = validate(LlmApiSpec, values, where)
    if not spec.target:
        raise ConfigError(f"target is missing: name the checkpoint to serve ({where('target')})")
    folder = file.absolute().parent
    return spec.model_copy(update={key: resolved(getattr(spec, key), folder, where(key)) for key in CHECKPOINTS})


def manifest_of(spec: LlmApiSpec, port: int = 8010) -> LlmManifest:
    """Return the content of llm_api.json; raises ConfigError when the release or the checkpoint cannot run the spec."""
    release = find_llm_release(spec.trtllm_version)
    checkpoint, config = read_checkpoint(spec.target), speculative_config(spec)
    max_seq_len, draft_len = min(spec.max_seq_len, checkpoint.max_positions), config.get("max_draft_len", 0)
    tensor_parallel = spec.tensor_parallel or spec.num_gpus
    options: dict[str, Any] = {
        # A prompt longer than max_num_tokens is refused unless it may be computed in parts.
        "enable_chunked_prefill": True,
        "kv_cache_config": {"enable_block_reuse": spec.block_reuse},
    }
    if config:
        options["speculative_config"] = config
        options["disable_overlap_scheduler"] = not _KINDS[spec.method].overlaps
    flags = {
        "--host": "0.0.0.0",
        "--port": port,
        "--config": OPTIONS,
        "--tp_size": tensor_parallel,
        "--max_batch_size": spec.max_batch_size,
        "--max_num_tokens": max(LEAST_NUM_TOKENS, spec.max_batch_size * (draft_len + 1)),
        "--max_seq_len": max_seq_len + draft_len,  # inferred: room for the drafts, as the builder makes it
    }
    words = [word for name, value in flags.items() for word in (name, str(value))]
    return LlmManifest(
        method=spec.method,
        command=["trtllm-serve", spec.target, "--grpc", *words],
        options=options,
        trtllm_version=spec.trtllm_version,
        image=release.image,
        tensor_parallel=tensor_parallel,
        vocab_size=checkpoint.vocab_size,
        max_seq_len=max_seq_len,
        engine_seq_len=max_seq_len + draft_len,
        max_draft_len=draft_len,
        block_reuse=spec.block_reuse,
        samples=spec.sampling,
    )


def write_folder(spec: LlmApiSpec, out: Path, port: int = 8010) -> LlmManifest:
    """Write llm_api.json, the options and the target's small files to `out`. Raises as `manifest_of` does."""
    manifest = manifest_of(spec, port)
    copy_small_files(Path(read_checkpoint(spec.target).tokenizer_file).parent, out)
    (out / OPTIONS).write_text(json.dumps(manifest.options, indent=1) + "\n", encoding="utf-8")
    manifest.write(out)
    return manifest


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(prog="python -m build.trtllm.llm_api", description=__doc__)
    made.add_argument("file", type=Path, metavar="FILE", help="the engines, in TOML")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder: serving.toml's target")
    made.add_argument("--port", type=int, default=8010, help="where trtllm-serve listens (%(default)s)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder and print the server's command; return the exit status."""
    options = parser().parse_args(arguments)
    try:
        manifest = write_folder(load_llm_spec(options.file), options.out, options.port)
    except (ConfigError, OSError) as error:
        print(f"trtllm: {error}", file=sys.stderr)
        return 2
    print(f"# in {manifest.image}\ncd {shlex.quote(str(options.out))} && {shlex.join(manifest.command)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
