"""`python -m tests.support.killed_build FOLDER N`: the whole build on a tiny corpus, killed again and again.

Each attempt is a process that kills itself (SIGKILL) instead of its N-th rename of a checkpoint, a stream or a
published folder; N = 0: it is never killed. The next attempt goes on where it stopped. Prints the number of attempts.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from build import models, recipe, train, training, workspace
from build.corpus import Corpus, Document
from build.heads import cli, continuations, measure, publish, text
from build.heads.settings import Settings
from build.recipe import Plan, Recipe, Shape

MAX_ATTEMPTS = 60
SHAPE = Shape(hidden=16, layers=7, heads=2, kv_heads=1, head_dim=8, mlp=24)
PLAN = Plan(tokens=4 * 128, peak_rate=1e-2, step_tokens=128, short_length=64, long_length=128, long_share=0.3)
TARGET = Recipe("target", SHAPE, PLAN)
DRAFT = Recipe("draft", replace(SHAPE, layers=1), replace(PLAN, tokens=2 * 128), teacher="target", teacher_weight=0.9)


def tiny_corpus() -> Corpus:
    """Return documents of random words, some of them held out."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(800)]
    documents = (Document(f"{number}.py", " ".join(rng.choice(words, 600)), str(number)) for number in range(150))
    corpus = Corpus(tuple(documents), "a test")
    assert corpus.train and corpus.held_out
    return corpus


def shrink() -> None:
    """Replace the corpus, the recipes and the sizes of all stages by tiny ones."""
    corpus, recipes = tiny_corpus(), {"target": TARGET, "draft": DRAFT}
    changes: tuple[tuple[Any, str, Any], ...] = (
        *((module, "load_corpus", lambda: corpus) for module in (models, workspace, text)),
        *((module, "RECIPES", recipes) for module in (models, recipe)),
        (models, "PLAN", replace(Settings().plan, tokens=3 * 128, step_tokens=128)),
        (models, "EXIT_DIM", 16),
        (models, "ALL_WINDOWS", 1),
        (train, "QUICK_HELD_OUT_WINDOWS", 1),
        (train, "can_compile", lambda device: False),
        (training, "CHECKPOINT_EVERY_S", 0.0),
        (publish, "MEASURED_WINDOWS", 2),
        (measure, "GREEDY_TOKENS", 40),
        (continuations, "CONTINUED_TOKENS", 6),
        (cli, "OWN_TOKENS", 6_000),
    )
    for module, name, value in changes:
        assert hasattr(module, name)
        setattr(module, name, value)


def kill_at(rename_number: int) -> None:
    """Make this process kill itself instead of making this rename."""
    renames = itertools.count(1)

    def counted(rename: Any) -> Any:
        def wrapped(path: Path, new: Path) -> Any:
            if next(renames) == rename_number:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(path, new)

        return wrapped

    for name in ("replace", "rename"):
        setattr(Path, name, counted(getattr(Path, name)))


def main(folder: Path, rename_number: int) -> None:
    """Run attempts until one ends without being killed."""
    shrink()
    for attempt in range(1, MAX_ATTEMPTS + 1):
        process = os.fork()
        if not process:
            torch.set_num_threads(1)
            kill_at(rename_number)
            models.main(["--any-corpus", "--device=cpu"], workspace.Workspace(folder))
            os._exit(0)
        status = os.waitpid(process, 0)[1]
        if not os.WIFSIGNALED(status):
            print(f"attempts {attempt}")
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit(f"not done after {MAX_ATTEMPTS} attempts")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
