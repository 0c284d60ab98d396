"""The trainer on a model of a few thousand parameters: exact resume, schedule, cut, distillation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from build import export, recipe, train, training
from build.corpus import Corpus, Document
from build.errors import BuildError
from build.losses import agreement, held_out_loss
from build.recipe import Plan, Recipe, Shape
from build.train import ModelRun, begin_run
from build.workspace import TrainingText, Workspace

PLAN = Plan(tokens=10 * 64, peak_rate=1e-2, step_tokens=64, short_length=16, long_length=32, long_share=0.3)
TINY = Recipe("tiny", Shape(hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=24, vocab=32), PLAN)
STREAM = np.random.default_rng(0).integers(0, 32, 5_000).astype(np.uint16)


@pytest.mark.parametrize(("device", "words"), [("cpu", "c++, g++, clang++"), ("cuda", "gcc, clang")])
def test_without_a_compiler_training_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str, words: str
) -> None:
    monkeypatch.setattr(training.shutil, "which", lambda name: None)
    assert not training.can_compile(torch.device(device))
    assert f"a compiler ({words})" in capsys.readouterr().out


def tiny_run() -> ModelRun:
    return begin_run(TINY, STREAM, "corpus", None, "cpu")


def steps(run: ModelRun, count: int) -> list[float]:
    return [run.train_step()["loss"] for _ in range(count)]


def save(run: ModelRun, path: Path) -> Path:
    run.save(path)
    return path


@pytest.mark.parametrize("stop", [3, 8])
def test_resumed_run_ends_with_the_parameters_of_an_uninterrupted_one(tmp_path: Path, stop: int):
    whole, first = tiny_run(), tiny_run()
    steps(whole, 10)
    steps(first, stop)
    second = tiny_run()
    second.resume(save(first, tmp_path / "checkpoint.pt"))
    steps(second, 10 - stop)
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_cut_run_resumes_with_its_own_schedule(tmp_path: Path):
    run = tiny_run()
    steps(run, 3)
    run.progress.finish_now()
    resumed = tiny_run()
    resumed.resume(save(run, tmp_path / "checkpoint.pt"))
    assert resumed.progress == run.progress
    assert resumed.progress.plan.steps == 5
    assert steps(resumed, 2) == steps(run, 2)


def test_checkpoint_of_another_corpus_is_refused(tmp_path: Path):
    path = save(tiny_run(), tmp_path / "checkpoint.pt")
    with pytest.raises(BuildError, match="another corpus"):
        begin_run(TINY, STREAM, "other", None, "cpu").resume(path)


def test_a_limit_of_time_shortens_the_plan_once_and_a_resumed_run_follows_it(tmp_path: Path):
    path, run = tmp_path / "checkpoint.pt", tiny_run()
    rate = run.fit(path, 1e-9)
    assert rate > 0 and run.progress.plan == replace(PLAN, tokens=64, is_shortened=True)
    resumed = tiny_run()
    resumed.fit(path, 3600.0)
    assert resumed.progress == run.progress
    assert run.train(path) and run.progress.step == 1


def test_checkpoint_of_another_recipe_or_teacher_is_refused(tmp_path: Path):
    path = save(tiny_run(), tmp_path / "checkpoint.pt")
    other = begin_run(replace(TINY, seed=1), STREAM, "corpus", None, "cpu")
    later = begin_run(TINY, STREAM, "corpus", None, "cpu", teacher_sha256="another")
    for run in (other, later):
        with pytest.raises(BuildError, match="another corpus, teacher"):
            run.resume(path)


def test_loss_of_a_learnable_stream_falls_and_bands_are_reported():
    stream = np.tile(np.arange(8, dtype=np.uint16), 1_000)
    run = begin_run(TINY, stream, "corpus", None, "cpu")
    losses = steps(run, 10)
    assert losses[-1] < losses[0]
    held_out = held_out_loss(run.model, stream, max_windows=2, length=512)
    assert list(held_out.bands) == ["0-128", "128-512"]
    assert held_out.mean == pytest.approx((held_out.bands["0-128"] * 128 + held_out.bands["128-512"] * 384) / 512)


def test_distilled_draft_of_a_perfect_copy_has_no_divergence():
    teacher = tiny_run().model.eval().requires_grad_(False)
    copy = begin_run(replace(TINY, teacher="tiny", teacher_weight=1.0), STREAM, "corpus", teacher, "cpu")
    assert copy.train_step()["loss"] == pytest.approx(0.0, abs=1e-5)
    same = agreement(teacher, teacher, np.tile(STREAM, 2), max_windows=1)
    assert same.greedy == 1.0
    assert same.overlap == pytest.approx(1.0, abs=1e-5)


def test_trained_models_are_exported_with_their_provenance_and_found_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    workspace = Workspace(tmp_path)
    (tmp_path / "target").mkdir()
    for name in export.TOKENIZER_FILES:
        (tmp_path / "target" / name).write_text("{}")
    text = TrainingText(Corpus((Document("a.py", "x", "0"),), "an interpreter"), np.tile(STREAM, 4), np.tile(STREAM, 4))
    monkeypatch.setattr(train, "training_text", lambda *arguments: text)
    monkeypatch.setattr(train, "can_compile", lambda device: False)
    student = replace(TINY, name="student", teacher="tiny", teacher_weight=0.5)
    monkeypatch.setattr(recipe, "RECIPES", {"tiny": TINY, "student": student})
    for each in (TINY, student):
        assert train.train_model(each.name, workspace, any_corpus=True)
        assert not export.is_published(each, workspace)
        export.export_model(each, workspace, text, max_windows=2)
        assert export.is_published(each, workspace)
    provenance = json.loads((tmp_path / "student" / "provenance.json").read_text())
    assert provenance["complete"] and provenance["tokens"] == 640
    assert provenance["corpus"]["interpreter"] == "an interpreter"
    assert provenance["agreement"]["with"] == "tiny"
    assert "distilled from | tiny, with weight 0.5" in (tmp_path / "student" / "README.md").read_text()
