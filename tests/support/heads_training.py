"""What the tests of the heads' trainer share: a tiny plan, a random text, the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from build.heads.settings import Settings, Sizes
from build.recipe import Plan
from tests.support.tiny_models import VOCAB_SIZE

PLAN = Plan(tokens=10 * 64, peak_rate=1.0, step_tokens=64, short_length=16, long_length=32, long_share=0.3)
SIZES = Sizes(medusa_heads=3, draft_vocab=40)
TINY = Settings(ablation=True, sizes=SIZES, plan=PLAN, dtype="float32")
STREAM = np.random.default_rng(0).integers(0, VOCAB_SIZE, 5_000).astype(np.uint16)
CPU = torch.device("cpu")


def write_corpus(folder: Path) -> Path:
    numbers = np.random.default_rng(3)
    letters = np.array(list("abcdefghij\n"))
    file = folder / "corpus.txt"
    file.write_text("".join(letters[numbers.integers(0, 11, 60_000)]))
    return file


def command(folder: Path, corpus: Path, out: Path, *more: str) -> list[str]:
    sizes = [
        "--tokens=256",
        "--step-tokens=64",
        "--own-tokens=0",
        "--medusa-heads=2",
        "--draft-vocab=20",
        "--dtype=float32",
    ]
    return [f"--target={folder}", f"--corpus={corpus}", f"--out={out}", "--device=cpu", *sizes, *more]
