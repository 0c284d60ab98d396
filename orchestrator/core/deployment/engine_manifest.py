"""What an engine folder says about itself: engine.json of a compiled engine, llm_api.json of TensorRT-LLM's LLM API."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.core.declarations import Declaration, read_json_file, validate
from orchestrator.core.deployment.checkpoint import Checkpoint, read_checkpoint
from orchestrator.core.deployment.config import COMPILED, ServingConfig
from orchestrator.core.errors import ConfigError, unknown_name
from orchestrator.core.methods import METHODS

NAME = "engine.json"
#: Folder beside the engine with the tokenizer.json and the config.json of the checkpoint that it was made from.
CHECKPOINT = "checkpoint"
#: Build mode of an engine that verifies chains sent by the server.
EXTERNAL = "draft_tokens_external"
MADE = "python -m build.trtllm build makes it"


class Manifest(Declaration):
    """What an engine was built for.

    mode: build mode; empty for an engine without one.
    max_seq_len: maximum tokens of prompt and output, draft tokens not counted.
    inputs: {folder or stage: SHA-256} of what the engine was made from. plan: the plan as JSON values.
    """

    role: str
    method: str
    mode: str
    gpu: str
    trtllm_version: str
    image: str
    num_ranks: int
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int
    vocab_size: int
    inputs: dict[str, str]
    plan: dict[str, Any]

    @property
    def engine_method(self) -> str:
        """The method with which the engine drafts by itself; empty = it does not."""
        return self.method if self.mode and METHODS[self.method].build_mode == self.mode else ""

    @property
    def padded_vocab_size(self) -> int:
        """Columns of the engine's logits: the vocabulary, rounded up to a multiple of its GPUs."""
        return -(-self.vocab_size // self.num_ranks) * self.num_ranks


def read_manifest(folder: Path) -> Manifest:
    """Read engine.json; raises ConfigError if it is missing or broken."""
    file = folder / NAME
    manifest = validate(Manifest, read_json_file(file, MADE), lambda key: f"{file}; build the engine again")
    if manifest.method not in METHODS:
        raise ConfigError(unknown_name("method", manifest.method, METHODS, f"{file}; build the engine again"))
    return manifest


def lookahead_sizes(manifest: Manifest) -> tuple[int, int, int]:
    """Return an engine's Lookahead window, n-gram and guesses, the largest that a request may ask for."""
    spec = manifest.plan["spec"]
    return spec["lookahead_window"], spec["lookahead_ngram"], spec["lookahead_guesses"]


def missing_files(folder: Path, num_ranks: int) -> list[str]:
    """Return the names of an engine's files that `folder` lacks."""
    names = ["config.json", *(f"rank{rank}.engine" for rank in range(num_ranks))]
    return [name for name in names if not (folder / name).is_file()]


def check_engine(folder: Path, *, version: str, draft: Path | None = None) -> Manifest:
    """Check that a server of TensorRT-LLM `version` can load the engine in `folder`; return its manifest.

    draft: folder of the draft model's engine, if there is one.
    Raises ConfigError for missing files, another version, or another vocabulary.
    """
    manifest = read_manifest(folder)
    if missing := missing_files(folder, manifest.num_ranks):
        raise ConfigError(f"the engine {folder} lacks {', '.join(missing)} (build it again)")
    built = read_json_file(folder / "config.json", MADE).get("version")
    if built != manifest.trtllm_version:
        raise ConfigError(
            f"the engine {folder} was made by TensorRT-LLM {built}, its {NAME} says {manifest.trtllm_version} "
            "(build it again)"
        )
    if built != version:
        raise ConfigError(f"the engine {folder} is of TensorRT-LLM {built}, this server is {version} (build it again)")
    if draft:
        _check_pair(folder, manifest, draft, check_engine(draft, version=version))
    return manifest


def check_role(folder: Path, manifest: Manifest, role: str) -> None:
    """Raise ConfigError if an engine was built for another role."""
    if manifest.role != role:
        raise ConfigError(f"the engine {folder} was built as {manifest.role}, not as {role} (key {role})")


def served_checkpoint(config: ServingConfig) -> Checkpoint:
    """Return what the orchestrator must know about the target, from its checkpoint or from its engine's folder.

    Raises ConfigError if a file is missing or broken, or the engine has another vocabulary.
    """
    folder = Path(config.target)
    if config.engine == "llm_api":
        checkpoint = read_checkpoint(config.target)
        return replace(checkpoint, max_positions=min(checkpoint.max_positions, read_llm_manifest(folder).max_seq_len))
    if config.engine not in COMPILED:
        return read_checkpoint(config.target)
    manifest = read_manifest(folder)
    checkpoint = read_checkpoint(str(folder / CHECKPOINT))
    if checkpoint.vocab_size != manifest.vocab_size:
        raise ConfigError(
            f"the engine {folder} has {manifest.vocab_size} tokens in its vocabulary, {folder / CHECKPOINT} has "
            f"{checkpoint.vocab_size} (put the target's own files there)"
        )
    # Every step hands the engine the whole text as a prompt; even the longest prompt is followed by one token.
    longest = min(manifest.max_seq_len, manifest.max_input_len + 1)
    return replace(checkpoint, max_positions=min(checkpoint.max_positions, longest))


def _check_pair(folder: Path, target: Manifest, draft_folder: Path, draft: Manifest) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft engine {draft_folder} has {draft.vocab_size} tokens in its vocabulary, "
            f"the target {folder} has {target.vocab_size}"
        )
    if draft.mode:
        raise ConfigError(f"the draft engine {draft_folder} is built for {draft.mode}; a draft model has no such mode")


LLM_NAME = "llm_api.json"


class LlmManifest(Declaration):
    """What `trtllm-serve --grpc` runs.

    method: how it drafts; "none": it does not. command: the words of its command line; options: its --config file.
    max_draft_len: draft tokens that a pass verifies. max_seq_len: maximum tokens of prompt and output; engine_seq_len:
    with room for the drafts. block_reuse: whether requests share KV blocks. samples: whether it draws with drafts.
    """

    method: str
    command: list[str]
    options: dict[str, Any]
    trtllm_version: str
    image: str
    tensor_parallel: int
    vocab_size: int
    max_seq_len: int
    engine_seq_len: int
    max_draft_len: int
    block_reuse: bool
    samples: bool

    @property
    def max_input_len(self) -> int:
        """Maximum tokens of a prompt."""
        return self.max_seq_len - 1

    def write(self, folder: Path) -> Path:
        """Write llm_api.json to `folder` and return it."""
        file = folder / LLM_NAME
        file.write_text(json.dumps(self.model_dump(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return file


def read_llm_manifest(folder: Path) -> LlmManifest:
    """Read llm_api.json; raises ConfigError if it is missing or broken."""
    file = folder / LLM_NAME
    content = read_json_file(file, "engine = 'llm_api' needs a folder that python -m build.trtllm.llm_api has made")
    return validate(LlmManifest, content, lambda key: f"{file}; make it again")
