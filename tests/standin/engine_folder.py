"""Engine folders as the builder leaves them, but for the engine: its rank file names the checkpoint to run instead."""

import json
import shutil
from pathlib import Path

from build.trtllm.manifest import write_manifest
from orchestrator.engine_manifest import CHECKPOINT, EXTERNAL, Manifest

VERSION = "1.2.1"
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
FILES = ("config.json", "generation_config.json", "tokenizer.json")


def make_engine(
    folder: Path,
    checkpoint: Path,
    *,
    role: str = "target",
    mode: str = EXTERNAL,
    method: str = "draft_model",
    max_draft_len: int = 16,
    max_seq_len: int = 256,
    max_batch_size: int = 8,
    plan: dict | None = None,
    **changes,
) -> Path:
    """Write config.json, the rank file, engine.json and the checkpoint's small files to `folder`; return it."""
    (folder / CHECKPOINT).mkdir(parents=True)
    for name in FILES:
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, folder / CHECKPOINT / name)
    limits = {
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len + max_draft_len,  # the library's builder adds the drafts
        "max_draft_len": max_draft_len,
        "speculative_decoding_mode": mode,
    }
    engine = {"version": VERSION, "pretrained_config": {}, "build_config": limits}
    (folder / "config.json").write_text(json.dumps(engine))
    (folder / "rank0.engine").write_text(str(checkpoint))
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    values = {
        "role": role, "method": method, "mode": mode, "gpu": "h100", "trtllm_version": VERSION, "image": IMAGE,
        "num_ranks": 1, "max_batch_size": max_batch_size, "max_input_len": max_seq_len, "max_seq_len": max_seq_len,
        "max_draft_len": max_draft_len, "vocab_size": vocab_size, "inputs": {},
        "plan": plan or {"servers": {role: {"max_tokens_in_paged_kv_cache": "4096"}}},
    }  # fmt: skip
    write_manifest(folder, Manifest(**{**values, **changes}))
    return folder
