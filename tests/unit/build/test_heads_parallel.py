"""Data-parallel training: two processes on the CPU, by torchrun, end with the heads of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from build.parallel import Workers
from tests.support.tiny_models import make_tiny_target

ROOT = Path(__file__).resolve().parents[3]
#: Runs the command in every process, with short measurements, and keeps each process's parameters.
TRAIN = """
import os, sys, torch
from build.heads import cli, measure, publish, text
publish.MEASURED_WINDOWS, measure.WINDOW, measure.PROMPT_TOKENS, measure.GREEDY_TOKENS = 4, 48, 8, 24
text.DOCUMENT_CHARS = 1_000
begin_run, runs = cli.begin_run, []
def noted(*args):
    runs.append(begin_run(*args))
    return runs[-1]
cli.begin_run = noted
folder, *arguments = sys.argv[1:]
cli.main(arguments)
torch.save(runs[0].heads.state_dict(), f"{folder}/heads-{os.environ.get('RANK', 'alone')}.pt")
"""


def train(folder: Path, target: Path, launcher: list[str]) -> str:
    """Train in a folder of its own and return what was printed."""
    folder.mkdir()
    script, corpus = folder / "train.py", folder / "corpus.txt"
    script.write_text(TRAIN)
    letters = np.array(list("abcdefghij\n"))
    corpus.write_text("".join(letters[np.random.default_rng(3).integers(0, 11, 60_000)]))
    # 96 tokens a step are three windows: two for the first process, one for the second.
    options = [
        f"--target={target}", f"--corpus={corpus}", f"--out={folder / 'out'}", "--device=cpu", "--tokens=576",
        "--step-tokens=96", "--own-tokens=0", "--medusa-heads=2", "--draft-vocab=20", "--dtype=float32", "--threads=1",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(folder), *options], cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_processes_end_with_the_heads_of_one(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", num_hidden_layers=7, max_position_embeddings=32)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train(tmp_path / "one", target, [])
    said = train(tmp_path / "two", target, launcher)
    assert said.count("about") == 1, "the first process alone says what the run will cost"
    alone = torch.load(tmp_path / "one" / "heads-alone.pt")
    first, second = (torch.load(tmp_path / "two" / f"heads-{rank}.pt") for rank in (0, 1))
    assert alone.keys() == first.keys() and len(alone) > 20
    for name, parameter in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], parameter, rtol=1e-3, atol=1e-4, msg=name)
    state = torch.load(tmp_path / "two" / "out" / ".train" / "heads" / "checkpoint.pt", weights_only=True)
    assert state["progress"]["step"] == 6 and set(state["progress"]["losses"]) == {
        "medusa",
        "eagle",
        "eagle3",
        "redrafter",
    }
    assert (tmp_path / "two" / "out" / "eagle" / "model.safetensors").exists()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_row_of_a_batch_belongs_to_one_process(size: int) -> None:
    rows = torch.arange(4)
    shares = [Workers(rank, size).share(rows).tolist() for rank in range(size)]
    assert sorted(row for share in shares for row in share) == [0, 1, 2, 3]
    assert max(map(len, shares)) == len(shares[0]) == -(-4 // size)
