"""Engine folders as the builder leaves them, but for the engine: its rank file names the checkpoint to run instead."""

import json
import shutil
from pathlib import Path

from build.trtllm.record import write_manifest
from orchestrator.core.deployment.engine_manifest import CHECKPOINT, EXTERNAL, Manifest
from orchestrator.core.methods import METHODS

VERSION = "1.2.1"
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
#: Lookahead's sizes, for which an engine needs 15 draft tokens.
SPEC = {
    "lookahead_window": 4, "lookahead_ngram": 3, "lookahead_guesses": 4, "eagle_layers": 4, "eagle_non_leaves": 10, "eagle_top_k": 4,
}  # fmt: skip
#: Build mode of an engine that drafts by itself -> the method that it is built for here.
BUILD_MODES = {method.build_mode: method.name for method in reversed(METHODS.values()) if method.build_mode}
FILES = ("config.json", "generation_config.json", "tokenizer.json")


def tree_of(num_nodes: int) -> list[list[int]]:
    """A tree of four levels with so many nodes, up to 4 of a level with children."""
    paths = [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], *([rank] for rank in range(1, 4)), *([r, 0] for r in range(1, 4))]
    return [*paths, *([0, 0, 0, rank] for rank in range(1, num_nodes))][:num_nodes]


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
    eagle = {"num_eagle_layers": SPEC["eagle_layers"], "max_non_leaves_per_layer": SPEC["eagle_non_leaves"]}
    engine = {"version": VERSION, "pretrained_config": eagle if mode == "eagle" else {}, "build_config": limits}
    (folder / "config.json").write_text(json.dumps(engine))
    (folder / "rank0.engine").write_text(str(checkpoint))
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    if method == "draft_model" and mode not in ("", EXTERNAL):  # the method that the mode is for
        method = BUILD_MODES[mode]
    values = {
        "role": role, "method": method, "mode": mode, "gpu": "h100", "trtllm_version": VERSION, "image": IMAGE,
        "num_ranks": 1, "max_batch_size": max_batch_size, "max_input_len": max_seq_len, "max_seq_len": max_seq_len,
        "max_draft_len": max_draft_len, "vocab_size": vocab_size, "inputs": {},
        "plan": plan or {"servers": {role: {"max_tokens_in_paged_kv_cache": "4096"}}, "spec": SPEC | _tree(mode, method, max_draft_len)},
    }  # fmt: skip
    write_manifest(folder, Manifest(**{**values, **changes}))
    return folder


def _tree(mode: str, method: str, max_draft_len: int) -> dict:
    """The tree of an engine that has one, where it is not the library's own."""
    needs = mode in ("medusa", "eagle") and method != "eagle2" and max_draft_len != 63
    return {"choices": json.dumps(tree_of(max_draft_len))} if needs else {}
