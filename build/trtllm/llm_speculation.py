"""The `speculative_config` of the LLM API (TensorRT-LLM's PyTorch backend, which needs no compiled engine).

EXPERIMENTAL: names are checked against a table made from sources and documentation; no LLM has been made from one.
The draft length and all else here are fixed when the server starts: a request cannot choose.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from build.trtllm.modes import MODES, MOST_NODES
from build.trtllm.versions import DEFAULT
from orchestrator.core.declarations import Declaration
from orchestrator.core.errors import ConfigError, unknown_name

Value = str | int | bool


class LlmApiSpec(Declaration):
    """What the LLM API is to run; see EngineSpec for the keys that compiled engines have, too."""

    #: ours, or mtp
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
    """fields: arguments of the class `class_name`. llm: further arguments of LLM()."""

    class_name: str
    decoding_type: str
    fields: dict[str, Value]
    llm: dict[str, bool]

    @property
    def speculative_config(self) -> dict[str, Value]:
        """The plain dict, as in YAML."""
        return {"decoding_type": self.decoding_type, **self.fields}

    @property
    def draft_len(self) -> int:
        """How many draft tokens a pass verifies."""
        return int(self.fields.get("max_draft_len", self.fields.get("num_nextn_predict_layers", 0)))


@dataclass(frozen=True)
class _Kind:
    """One method. old_type, new_type: its decoding type by generation of names. draft_len: the default."""

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
_REFUSED = {
    "medusa": _COMPILED,
    "lookahead": _COMPILED,
    "eagle": f"EAGLE-1 is run by compiled engines, the PyTorch backend is known to run EAGLE-3 ({_COMPILED})",
    "eagle2": "its dynamic tree came after 1.2.1",
    "redrafter": _NO_TYPE,
    "ngram": f"{_NO_TYPE}; its NGram looks up the prompt (method prompt_lookup)",
    "suffix": _NO_TYPE,
    "jacobi": _NO_TYPE,
    "predicted": _NO_TYPE,
    "none": "LLM() without a speculative_config does it",
}
#: Releases by their names; the split between the generations of `speculative_model` is inferred.
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
        _fields(spec, length, "speculative_model_dir" if is_old else "speculative_model"),
        {} if kind.overlaps else {"disable_overlap_scheduler": True},
    )


def _kind(spec: LlmApiSpec) -> _Kind:
    if spec.trtllm_version not in (*_OLD, *_NEW):
        raise ConfigError(
            f"the LLM API's names in TensorRT-LLM {spec.trtllm_version} are not known here "
            f"(known: {', '.join((*_OLD, *_NEW))}; key trtllm_version)"
        )
    if spec.method in _REFUSED:
        raise ConfigError(f"method {spec.method!r} is not for the LLM API: {_REFUSED[spec.method]} (key method)")
    if spec.method not in _KINDS:
        raise ConfigError(unknown_name("method", spec.method, _KINDS, "key method"))
    kind = _KINDS[spec.method]
    if bool(spec.drafter) is not kind.has_drafter:
        rule = "name a checkpoint" if kind.has_drafter else "be empty"
        raise ConfigError(f"drafter must {rule} for method {spec.method}, got {spec.drafter!r} (key drafter)")
    return kind


def _fields(spec: LlmApiSpec, length: int, model_key: str) -> dict[str, Value]:
    """Return the arguments of the class."""
    if spec.method == "mtp":  # the heads are in the target's checkpoint; each layer drafts one token
        return {"num_nextn_predict_layers": length}
    if spec.method != "prompt_lookup":
        return {"max_draft_len": length, model_key: spec.drafter}
    return {
        "max_draft_len": length,
        "max_matching_ngram_size": spec.max_ngram,
        # By default all requests share a pool: from timing and drafts, a client could infer other clients' texts.
        "is_public_pool": False,
    }
