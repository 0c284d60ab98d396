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
from build.heads.make import frequent_tokens
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


def test_cut_run_ends_with_long_windows(target: FrozenTarget):
    run = tiny_run(target)
    for _ in range(3):
        run.train_step()
    run.progress.finish_now()
    assert run.progress.plan.steps == 5
    assert run.progress.plan.phase(3).length == 32


@pytest.mark.parametrize("change", [{"corpus": "other"}, {"settings": replace(TINY, seed=1)}])
def test_checkpoint_of_another_run_is_refused(target: FrozenTarget, tmp_path: Path, change: dict):
    tiny_run(target).save(tmp_path / "checkpoint.pt")
    with pytest.raises(BuildError, match="another corpus, teacher, target or settings"):
        tiny_run(target, **change).resume(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tokens": 1280},
            r"follows a plan of tokens 640, but 1280 was requested \(--tokens\); request 640 to continue",
        ),
        ({"step_tokens": 32}, r"step_tokens 64, but 32 was requested \(--step-tokens\)"),
        ({"floor": 0.5}, r"floor 0\.05, but 0\.5 was requested \(build/heads/settings\.py\)"),
    ],
)
def test_checkpoint_of_another_plan_is_refused_with_both_numbers(
    target: FrozenTarget, tmp_path: Path, change: dict, words: str
):
    tiny_run(target).save(tmp_path / "checkpoint.pt")
    with pytest.raises(BuildError, match=words):
        tiny_run(target, replace(TINY, plan=replace(PLAN, **change))).resume(tmp_path / "checkpoint.pt")


def test_checkpoint_of_a_cut_run_is_gone_on_with_the_uncut_plan_s_options(target: FrozenTarget, tmp_path: Path):
    run = tiny_run(target)
    run.progress.step = 3
    run.progress.finish_now()
    run.save(tmp_path / "checkpoint.pt")
    other = tiny_run(target)
    other.resume(tmp_path / "checkpoint.pt")
    assert other.progress.plan.cut_step == 3


def test_losses_fall_on_a_text_that_repeats_itself(target: FrozenTarget):
    settings = replace(TINY, plan=replace(PLAN, tokens=60 * 64), parts={k: Part(5e-3, depth=3) for k in TINY.parts})
    run = begin_run(settings, target, np.tile(np.arange(8, dtype=np.uint16), 600), "corpus")
    losses = [run.train_step() for _ in range(30)]
    assert all(losses[-1][name] < losses[0][name] for name in run.heads)


def test_draft_vocabulary_is_of_the_most_frequent_tokens():
    stream = np.array([5, 5, 5, 2, 2, 9, 9, 1], dtype=np.uint16)
    assert frequent_tokens(stream, 3, 16).tolist() == [2, 5, 9]
    with pytest.raises(BuildError, match=r"must be in 1..16, got 17"):
        frequent_tokens(stream, 17, 16)
