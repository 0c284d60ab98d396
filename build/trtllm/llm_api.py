"""`python -m build.trtllm.llm_api`: a folder for engine = "llm_api" (TensorRT-LLM's PyTorch backend), ready to serve.

From the same file as compiled engines: keys that only those have, the GPU above all, are left aside. EXPERIMENTAL:
names are checked against a table compiled from sources and documentation; no LLM has been made from one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from build.trtllm.llm_speculation import LlmApiSpec, speculation
from build.trtllm.record import copy_small_files
from build.trtllm.spec import CHECKPOINTS, EngineSpec
from build.trtllm.versions import find_release
from orchestrator.core.declarations import read_toml, validate
from orchestrator.core.errors import ConfigError
from orchestrator.deployment.checkpoint import read_checkpoint
from orchestrator.deployment.config import resolved
from orchestrator.deployment.engine_manifest import LlmManifest

# They would change the model; a checkpoint that is quantised already is served as it is.
_REFUSED = ("quantisation", "drafter_quantisation", "kv_cache_dtype")


def load_llm_spec(file: Path) -> LlmApiSpec:
    """Read the engines' file; raises ConfigError: unreadable, an unknown key, a wrong value, no target."""
    content = read_toml(file, "engine")
    for key in _REFUSED:
        if content.get(key, "none") not in ("none", "same", "auto"):
            raise ConfigError(
                f"{key} is for compiled engines; the LLM API takes the checkpoint as it is (key {key} in {file})"
            )
    compiled_only = EngineSpec.model_fields.keys() - LlmApiSpec.model_fields.keys()
    values = {key: value for key, value in content.items() if key not in compiled_only}
    spec = validate(LlmApiSpec, values, lambda key: f"key {key} in {file}")
    if not spec.target:
        raise ConfigError(f"target is missing: name the checkpoint to serve (key target in {file})")
    folder = file.absolute().parent
    return spec.model_copy(update={key: resolved(getattr(spec, key), folder) for key in CHECKPOINTS})


def manifest_of(spec: LlmApiSpec) -> LlmManifest:
    """Return what the folder says; raises ConfigError for what the release or the checkpoint lacks."""
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
            **(found.llm if found else {}),
        },
        trtllm_version=spec.trtllm_version,
        image=find_release(spec.trtllm_version).image,
        vocab_size=checkpoint.vocab_size,
        max_seq_len=max_seq_len,
        max_draft_len=draft_len,
    )


def write_folder(spec: LlmApiSpec, out: Path) -> Path:
    """Write llm_api.json and the target's small files to `out`; return the former. Errors: as in `manifest_of`."""
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
