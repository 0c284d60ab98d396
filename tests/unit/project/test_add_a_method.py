"""docs/architecture.md, Add a method: its two code blocks, put into a copy of the source, serve requests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

#: Runs in the copy: requests through the public inputs, the registry and the loop, against a table for a target.
SERVE = """
import json
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.deployment.checkpoint import read_checkpoint
from orchestrator.core.deployment.config import ServingConfig, load_config
from orchestrator.server.loop import StepByStep, generate
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.server.request_builder import RequestBuilder
from orchestrator.server.inputs import read
from auditor.reference import decoding as reference
from orchestrator.core.grammar import Grammars
from tests.support.table_target import TableTarget

config = load_config("tests/data/serving.toml", {"SERVING_DEFAULT_SPECULATION": "echo"})
checkpoint = read_checkpoint(config.target)
grammars = Grammars(checkpoint.tokenizer_file, checkpoint.vocab_size, checkpoint.eos_ids)
builder = RequestBuilder(config, checkpoint, frozenset(), grammars)
target = TableTarget(checkpoint.vocab_size, order=1, sharpness=4.0)
expected = reference.generate(target.logits, [5, 6, 7], Sampling(), 24)
for inputs in ({}, {"speculation": "echo", "speculation_config": {"draft_len": 2}}, {"speculation": "echo+suffix"}):
    fixed = {"input_ids": [5, 6, 7], "max_tokens": 24, "ignore_eos": True}
    if "speculation_config" in inputs:
        inputs["speculation_config"] = json.dumps(inputs["speculation_config"])
    request = builder.build(read({}, json.dumps(fixed | inputs)))
    sequence, chunks = request.sequence(0, checkpoint.tokenizer), []
    proposer = request.plan.proposer(ProposerDependencies(None, checkpoint.vocab_size))
    generate(sequence, StepByStep(sequence, target, proposer), lambda: None, chunks.append)
    assert [token for chunk in chunks for token in chunk.ids] == expected
    assert any("echo" in source for source in sequence.statistics.sources), sequence.statistics.sources
print("served by", builder.build(read({}, json.dumps({"input_ids": [5]}))).plan.method)
"""


def test_a_newcomer_adds_a_method_in_two_places(tmp_path: Path) -> None:
    section = (ROOT / "docs/architecture.md").read_text().split("## Add a method", 1)[1].split("\n## ", 1)[0]
    proposer, declaration = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    shutil.copytree(ROOT / "orchestrator", tmp_path / "orchestrator", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "orchestrator/drafting/echo.py").write_text(proposer)
    table = tmp_path / "orchestrator/core/methods.py"
    head, tail = table.read_text().split("\n)\n\nMETHODS", 1)
    table.write_text(f"{head}\n{declaration})\n\nMETHODS{tail}")
    served = subprocess.run(
        [sys.executable, "-c", SERVE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert (served.returncode, served.stdout) == (0, "served by echo\n"), served.stderr
