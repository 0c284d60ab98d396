"""The first-run kit from its plan to its report, over the stand-in: tools on PATH, and the library in a real Triton."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from build.trtllm.check import main
from tests.server.conftest import repository

pytestmark = pytest.mark.server

# The container's tools, which leave what the stand-in for the library loads: a rank file that names the checkpoint.
TOOL = """#!{python}
import json, sys
from pathlib import Path
words = sys.argv[1:]
if words[0] == "-c":
    print("1.2.1"); sys.exit()
flags = dict(zip(words[0::2] if words[0].startswith("--") else words[1::2],
                 words[1::2] if words[0].startswith("--") else words[2::2]))
out = Path(flags["--output_dir"])
out.mkdir(parents=True, exist_ok=True)
if "--checkpoint_dir" not in flags:
    (out / "config.json").write_text("{{}}")
    (out / "source").write_text(flags["--model_dir"])
    sys.exit()
if flags.get("--speculative_decoding_mode") == "lookahead_decoding":
    sys.exit("trtllm-build: error: argument --speculative_decoding_mode: invalid choice")
drafts = int(flags.get("--max_draft_len", 0))
limits = {{"max_batch_size": int(flags["--max_batch_size"]), "max_seq_len": int(flags["--max_seq_len"]) + drafts,
          "max_draft_len": drafts, "speculative_decoding_mode": flags.get("--speculative_decoding_mode", "")}}
(out / "config.json").write_text(json.dumps({{"version": "1.2.1", "pretrained_config": {{}}, "build_config": limits}}))
(out / "rank0.engine").write_text(Path(flags["--checkpoint_dir"], "source").read_text())
"""


def test_kit_runs_dry_and_reports_what_broke(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools, examples = tmp_path / "bin", tmp_path / "examples"
    tools.mkdir()
    for name in ("python3", "trtllm-build"):
        (tools / name).write_text(TOOL.format(python=sys.executable))
        (tools / name).chmod(0o755)
    for script in ("models/core/llama/convert_checkpoint.py", "quantization/quantize.py"):
        (examples / script).parent.mkdir(parents=True)
        (examples / script).touch()
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    models = repository(tmp_path, "speculative", "speculative_unary", target="standin.py", draft="standin.py")
    arguments = ["--out", str(tmp_path / "out"), "--cases", "draft_model,lookahead", "--device", "cpu"]
    arguments += ["--target", str(checkpoints / "target"), "--drafter", str(checkpoints / "draft")]
    arguments += ["--examples-dir", str(examples), "--model-repository", str(models), "--limit-s", "120"]
    assert main(arguments) == 1  # one case breaks
    outcomes = json.loads((tmp_path / "out/report.json").read_text())["outcomes"]
    found = {(each["case"], each["stage"]): each for each in outcomes}
    drafted = [found["draft_model", stage] for stage in ("plan", "build", "torch", "engine", "compare")]
    assert [each["status"] for each in drafted] == ["ok"] * 5, [each["tail"] for each in drafted]
    assert found["draft_model", "engine"]["found"]["total_draft_tokens"] > 0
    assert found["draft_model", "compare"]["found"]["of"] == 3
    assert found["lookahead", "build"]["assumption"] == "flags of a command (build/trtllm/commands.py)"
    assert found["lookahead", "engine"]["status"] == "skipped"
    assert "report.md" in capsys.readouterr().out
