"""llm_api.json: what TensorRT-LLM's LLM API is to run, as a folder says; `python -m build.trtllm.llm_api` writes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NAME = "llm_api.json"


@dataclass(frozen=True)
class LlmManifest:
    """method: what it drafts with, "none" = it does not. model: the checkpoint.

    config_class, speculative_config: names of the release: the class, and its fields with their decoding_type; empty
    for the method none. keywords: of LLM() beside these two. max_draft_len: tokens that a pass verifies.
    max_seq_len: tokens of prompt and text.
    """

    method: str
    model: str
    config_class: str
    speculative_config: dict[str, Any]
    keywords: dict[str, Any]
    trtllm_version: str
    image: str
    vocab_size: int
    max_seq_len: int
    max_draft_len: int

    @property
    def max_input_len(self) -> int:
        """Tokens of the longest prompt."""
        return self.max_seq_len - 1

    def write(self, folder: Path) -> Path:
        """Write llm_api.json to `folder` and return it."""
        file = folder / NAME
        file.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return file


def read_llm_manifest(folder: Path) -> LlmManifest:
    """Read llm_api.json; raises ConfigError when it is missing or broken."""
    file = folder / NAME
    values = read_keys(
        file,
        LlmManifest,
        made="engine = 'llm_api' needs a folder that python -m build.trtllm.llm_api has made",
        again="make it again",
    )
    return LlmManifest(**values)


def read_keys(file: Path, kind: type[DataclassInstance], *, made: str, again: str) -> dict[str, Any]:
    """Read a JSON object with exactly the fields of `kind`; raises ConfigError. made, again: what to do without it."""
    values = read_object(file, made)
    known = {f.name for f in fields(kind)}
    if values.keys() != known:
        odd = ", ".join(sorted(known ^ values.keys()))
        raise ConfigError(f"{file} has not the keys of this version: {odd} ({again})")
    return values


def read_object(file: Path, made: str) -> dict[str, Any]:
    """Read a JSON object; raises ConfigError. made: what makes the file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror} ({made})") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object, got {type(values).__name__}")
    return values
