"""`python -m build.trtllm.llm_api`: a folder for engine = "llm_api" (TensorRT-LLM's PyTorch backend), ready to serve.

It reads the file of the compiled engines, and ignores the keys that only those have, the GPU above all. The draft
length and all else here are fixed when the server starts: a request cannot choose.
EXPERIMENTAL: names are checked against a table compiled from sources and documentation; no LLM has been made from one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from build.trtllm.engines import LEAST_NUM_TOKENS
from build.trtllm.modes import MODES, MOST_NODES
from build.trtllm.record import copy_small_files
from build.trtllm.spec import CHECKPOINTS, EngineSpec
from build.trtllm.versions import DEFAULT, find_release
from orchestrator.core.declarations import Declaration, read_toml, validate
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import resolved
from orchestrator.core.deployment.engine_manifest import LlmManifest
from orchestrator.core.errors import ConfigError, unknown_name

Value = str | int | bool


class LlmApiSpec(Declaration):
    """What the LLM API runs; EngineSpec describes the keys that compiled engines share."""

    #: the drafting method: one of the server's, or mtp
    method: str = "none"
    target: str = ""
    #: checkpoint of the draft model or of the EAGLE-3 head; empty for the other methods
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
    trtllm_version: str = DEFAULT


@dataclass(frozen=True)
class LlmSpeculation:
    """How an LLM drafts. fields: arguments of the class `class_name`. llm: further arguments of LLM()."""

    class_name: str
    decoding_type: str
    fields: dict[str, Value]
    llm: dict[str, bool]

    @property
    def speculative_config(self) -> dict[str, Value]:
        """The configuration as a plain dict, as in YAML."""
        return {"decoding_type": self.decoding_type, **self.fields}

    @property
    def draft_len(self) -> int:
        """How many draft tokens a pass verifies."""
        return int(self.fields.get("max_draft_len", self.fields.get("num_nextn_predict_layers", 0)))


@dataclass(frozen=True)
class _Kind:
    """One method. old_type, new_type: its decoding type in the releases _OLD and _NEW. draft_len: the default."""

    class_name: str
    old_type: str
    new_type: str
    draft_len: int
    has_drafter: bool = False
    overlaps: bool = True


# Inferred: the class of 1.2 for the type Eagle3, which our sources write as EagleDecodingConfig/Eagle3; the dict names
# the type only. EAGLE-3's default length is our choice.
_KINDS = {
    "draft_model": _Kind(
        "DraftTargetDecodingConfig",
        "DraftTarget",
        "Draft_Target",
        MODES["draft_model"].draft_len,
        has_drafter=True,
        overlaps=False,
    ),
    "eagle3": _Kind("EagleDecodingConfig", "Eagle", "Eagle3", 4, has_drafter=True),
    "mtp": _Kind("MTPDecodingConfig", "MTP", "MTP", 1),
    "prompt_lookup": _Kind("NGramDecodingConfig", "NGram", "NGram", MODES["prompt_lookup"].draft_len, overlaps=False),
}
_COMPILED = "its type is for compiled engines only (python -m build.trtllm)"
_NO_TYPE = "the LLM API has no decoding type for it"
_NOT_RUN = {
    "medusa": _COMPILED,
    "lookahead": _COMPILED,
    "eagle": f"EAGLE-1 is run by compiled engines, the PyTorch backend is known to run EAGLE-3 ({_COMPILED})",
    "eagle2": "its dynamic tree came after 1.2.1",
    "redrafter": _NO_TYPE,
    "ngram": f"{_NO_TYPE}; its NGram looks up the prompt (method prompt_lookup)",
    "suffix": _NO_TYPE,
    "jacobi": _NO_TYPE,
    "recycling": _NO_TYPE,
    "predicted": _NO_TYPE,
    "auto": "it chooses among the drafts of this server at each step",
    "none": "LLM() without a speculative_config does it",
}
#: Releases with the old and with the new names.
_OLD, _NEW = ("1.0.0", "1.1.0"), ("1.2.0", "1.2.1")


def speculation(spec: LlmApiSpec) -> LlmSpeculation:
    """Return the speculation of a spec; raises ConfigError, with the reason, when the release lacks it."""
    kind = _kind(spec)
    is_old = spec.trtllm_version in _OLD
    length = spec.draft_len or kind.draft_len
    if spec.method == "mtp" and length > 1 and is_old:
        raise ConfigError(f"draft_len must be 1 for method mtp before 1.2, got {length} (key trtllm_version)")
    return LlmSpeculation(
        kind.class_name,
        kind.old_type if is_old else kind.new_type,
        _fields(spec, length),
        {} if kind.overlaps else {"disable_overlap_scheduler": True},
    )


def _kind(spec: LlmApiSpec) -> _Kind:
    if spec.trtllm_version not in (*_OLD, *_NEW):
        raise ConfigError(
            f"the LLM API's names in TensorRT-LLM {spec.trtllm_version} are not known here "
            f"(known: {', '.join((*_OLD, *_NEW))}; key trtllm_version)"
        )
    if spec.method in _NOT_RUN:
        raise ConfigError(f"method {spec.method!r} is not for the LLM API: {_NOT_RUN[spec.method]} (key method)")
    if spec.method not in _KINDS:
        raise ConfigError(unknown_name("method", spec.method, _KINDS, "key method"))
    kind = _KINDS[spec.method]
    if bool(spec.drafter) is not kind.has_drafter:
        rule = "name a checkpoint" if kind.has_drafter else "be empty"
        raise ConfigError(f"drafter must {rule} for method {spec.method}, got {spec.drafter!r} (key drafter)")
    return kind


def _fields(spec: LlmApiSpec, length: int) -> dict[str, Value]:
    """Return the arguments of the class."""
    if spec.method == "mtp":  # the heads are in the target's checkpoint; each layer drafts one token
        return {"num_nextn_predict_layers": length}
    if spec.method != "prompt_lookup":
        # All releases know this name; `speculative_model` came later.
        return {"max_draft_len": length, "speculative_model_dir": spec.drafter}
    return {
        "max_draft_len": length,
        "max_matching_ngram_size": spec.max_ngram,
        # By default all requests share a pool: from timing and drafts, a client could infer other clients' texts.
        "is_public_pool": False,
    }


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


def manifest_of(spec: LlmApiSpec) -> LlmManifest:
    """Return the content of llm_api.json; raises ConfigError when the release or the checkpoint cannot run the spec."""
    checkpoint = read_checkpoint(spec.target)
    found = speculation(spec) if spec.method != "none" else None
    max_seq_len = min(spec.max_seq_len, checkpoint.max_positions)
    draft_len = found.draft_len if found else 0
    return LlmManifest(
        method=spec.method,
        model=spec.target,
        config_class=found.class_name if found else "",
        speculative_config=dict(found.speculative_config) if found else {},
        keywords={
            "backend": "pytorch",
            "tensor_parallel_size": spec.tensor_parallel or spec.num_gpus,
            "max_batch_size": spec.max_batch_size,
            "max_seq_len": max_seq_len + draft_len,  # inferred: room for the drafts, as the builder makes it
            # A prompt longer than max_num_tokens is refused unless it may be computed in parts.
            "max_num_tokens": max(LEAST_NUM_TOKENS, spec.max_batch_size * (draft_len + 1)),
            "enable_chunked_prefill": True,
            **(found.llm if found else {}),
        },
        trtllm_version=spec.trtllm_version,
        image=find_release(spec.trtllm_version).image,
        vocab_size=checkpoint.vocab_size,
        max_seq_len=max_seq_len,
        max_draft_len=draft_len,
    )


def write_folder(spec: LlmApiSpec, out: Path) -> Path:
    """Write llm_api.json and the target's small files to `out`; return llm_api.json. Raises as `manifest_of` does."""
    manifest = manifest_of(spec)
    copy_small_files(Path(read_checkpoint(spec.target).tokenizer_file).parent, out)
    return manifest.write(out)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(prog="python -m build.trtllm.llm_api", description=__doc__)
    made.add_argument("file", type=Path, metavar="FILE", help="the engines, in TOML")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder: serving.toml's target")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder; return the exit status."""
    options = parser().parse_args(arguments)
    try:
        print(write_folder(load_llm_spec(options.file), options.out))
    except (ConfigError, OSError) as error:
        print(f"trtllm: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
