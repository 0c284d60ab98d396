"""Training runs: resume, signals, checkpoints of other settings, losses that fall."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from build.errors import BuildError
from build.heads.settings import ABLATED, KINDS, Part, Settings
from build.heads.target import FrozenTarget
from build.heads.train import HeadsRun, begin_run
from tests.support.heads_training import PLAN, STREAM, TINY


def tiny_run(target: FrozenTarget, settings: Settings = TINY, corpus: str = "corpus") -> HeadsRun:
    return begin_run(settings, target, STREAM, corpus)


def test_resumed_run_ends_with_the_parameters_of_an_uninterrupted_one(target: FrozenTarget, tmp_path: Path):
    whole, first = tiny_run(target), tiny_run(target)
    for _ in range(10):
        whole.train_step()
    for _ in range(8):
        first.train_step()
    first.save(tmp_path / "checkpoint.pt")
    second = tiny_run(target)
    second.resume(tmp_path / "checkpoint.pt")
    assert [second.train_step() for _ in range(2)]
    assert second.progress.losses == whole.progress.losses
    for (name, one), other in zip(whole.heads.named_parameters(), second.heads.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_run_after_its_step_and_saves_it(target: FrozenTarget, tmp_path: Path, number: signal.Signals):
    run, path = tiny_run(target), tmp_path / "checkpoint.pt"

    class Interrupted(HeadsRun):
        def backward(self, windows: Tensor) -> dict[str, float]:
            if self.progress.step == 2:
                signal.raise_signal(number)
            return super().backward(windows)

    handler = signal.getsignal(number)
    run.__class__ = Interrupted
    assert not run.train(path)
    run.__class__ = HeadsRun
    assert signal.getsignal(number) is handler
    assert torch.load(path, weights_only=True)["progress"]["step"] == 3
    run.resume(path)
    assert run.train(path)
    assert run.progress.step == 10


def test_step_reads_the_target_once_for_all_heads_and_leaves_it_as_it_was(target: FrozenTarget):
    run, passes = tiny_run(target), []
    before = [parameter.clone() for parameter in target.model.parameters()]
    hook = target.model.register_forward_hook(lambda *given: passes.append(1))
    losses = run.train_step()
    hook.remove()
    assert passes == [1]
    assert list(losses) == [*KINDS, ABLATED]
    assert all(torch.equal(one, other) for one, other in zip(before, target.model.parameters(), strict=True))


def test_head_is_trained_alike_whatever_is_trained_beside_it(target: FrozenTarget):
    together, alone = tiny_run(target), tiny_run(target, replace(TINY, kinds=("medusa",), ablation=False))
    for _ in range(3):
        together.train_step()
        alone.train_step()
    for one, other in zip(together.heads["medusa"].parameters(), alone.heads["medusa"].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", [{"corpus": "other"}, {"settings": replace(TINY, seed=1)}])
def test_checkpoint_of_another_run_is_refused(target: FrozenTarget, tmp_path: Path, change: dict):
    tiny_run(target).save(tmp_path / "checkpoint.pt")
    with pytest.raises(BuildError, match="another corpus, teacher, target or settings"):
        tiny_run(target, **change).resume(tmp_path / "checkpoint.pt")


def test_losses_fall_on_a_text_that_repeats_itself(target: FrozenTarget):
    settings = replace(TINY, plan=replace(PLAN, tokens=60 * 64), parts={k: Part(5e-3, depth=3) for k in TINY.parts})
    run = begin_run(settings, target, np.tile(np.arange(8, dtype=np.uint16), 600), "corpus")
    losses = [run.train_step() for _ in range(30)]
    assert all(losses[-1][name] < losses[0][name] for name in run.heads)
