"""llm_api.json: what TensorRT-LLM's LLM API is to run, as a folder says; `python -m build.trtllm.llm_api` writes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError

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
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror} (engine = 'llm_api' needs a folder that "
            "python -m build.trtllm.llm_api has made)"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    known = {f.name for f in fields(LlmManifest)}
    if not isinstance(values, dict) or values.keys() != known:
        odd = ", ".join(sorted(known ^ set(values))) if isinstance(values, dict) else "it is no object"
        raise ConfigError(f"{file} has not the keys of this version: {odd} (make it again)")
    return LlmManifest(**values)
