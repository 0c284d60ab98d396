"""NOT TensorRT-LLM: the container's commands, which leave what the stand-in for the library loads.

A converted checkpoint names the model that it was made from, and so does an engine's rank file. The first argument is
the script, `-c` (the version is asked for), or a flag of `trtllm-build`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from tests.standin.tensorrt_llm import __version__

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("models/core/llama/convert_checkpoint.py", "quantization/quantize.py", "redrafter/convert_checkpoint.py")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the commands on PATH; return the folder of examples."""
    tools, examples = folder / "bin", folder / "examples"
    tools.mkdir()
    for name in ("python3", "trtllm-build"):
        command = f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.standin.container_tools "$@"'
        (tools / name).write_text(f"#!/bin/sh\n{command}\n")
        (tools / name).chmod(0o755)
    for script in SCRIPTS:
        (examples / script).parent.mkdir(parents=True)
        (examples / script).touch()
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return examples


def main(words):
    if words[0] == "-c":
        print(__version__)
        return
    script = "" if words[0].startswith("--") else words.pop(0)
    flags = dict(zip(words[0::2], words[1::2], strict=True))
    out = Path(flags["--output_dir"])
    out.mkdir(parents=True, exist_ok=True)
    if not script:
        build(flags, out)
    elif "redrafter" in script:
        add_redrafter(flags, out)
    else:
        ropes = json.loads(Path(flags["--model_dir"], "config.json").read_text()).get("rope_parameters") or {}
        write_checkpoint(out, flags["--model_dir"], {"rotary_base": ropes.get("rope_theta", 10000.0)})


def write_checkpoint(out, source, config):
    (out / "config.json").write_text(json.dumps(config))
    (out / "rank0.safetensors").write_text(source)


def add_redrafter(flags, out):
    """Read what examples/redrafter/convert_checkpoint.py reads of the base and of the drafter."""
    base, drafter = Path(flags["--base_model_checkpoint_dir"]), Path(flags["--drafter_model_dir"])
    config, keys = json.loads((base / "config.json").read_text()), json.loads((drafter / "config.json").read_text())
    with safe_open(drafter / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    hidden, width, blocks = keys["hidden_size"], keys["exit_dim"], keys["num_draft_layers"]
    wanted = {f"lm_head.{block}.linear.weight": [width, width] for block in range(blocks)}
    wanted |= {f"lm_head.{block}.linear.bias": [width] for block in range(blocks)}
    wanted |= {f"lm_head.{blocks}.weight": [keys["vocab_size"], width]}
    wanted |= {"input_proj.weight": [width, 2 * hidden], "input_proj.bias": [width]} if width != 2 * hidden else {}
    if keys["rnn"]:
        wanted |= {"rnn_u.weight": [hidden, hidden], "rnn_u.bias": [hidden], "rnn_w.weight": [hidden, hidden]}
    if missing := {name: shape for name, shape in wanted.items() if shapes.get(name) != shape}:
        sys.exit(f"convert_checkpoint.py: the drafter has {shapes}, not {missing}")
    write_checkpoint(out, (base / "rank0.safetensors").read_text(), {**config, "architecture": "ReDrafterForCausalLM"})


def build(flags, out):
    """Run `trtllm-build`; this release shall not know Lookahead, which breaks that case of the kit."""
    checkpoint, mode = Path(flags["--checkpoint_dir"]), flags.get("--speculative_decoding_mode", "")
    if mode == "lookahead_decoding":
        sys.exit("trtllm-build: error: argument --speculative_decoding_mode: invalid choice")
    is_redrafter = json.loads((checkpoint / "config.json").read_text()).get("architecture") == "ReDrafterForCausalLM"
    if is_redrafter != (mode == "explicit_draft_tokens"):
        sys.exit(f"trtllm-build: the checkpoint is not one of mode {mode!r}")
    drafts = int(flags.get("--max_draft_len", 0))
    limits = {"max_batch_size": int(flags["--max_batch_size"]), "max_seq_len": int(flags["--max_seq_len"]) + drafts}
    limits |= {"max_draft_len": drafts, "speculative_decoding_mode": mode}
    (out / "config.json").write_text(
        json.dumps({"version": __version__, "pretrained_config": {}, "build_config": limits})
    )
    (out / "rank0.engine").write_text((checkpoint / "rank0.safetensors").read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
