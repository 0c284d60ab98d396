"""Published heads: their files, provenance, settings and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from build.errors import BuildError
from build.heads.cli import main, parser, settings_of, up_to_date
from build.heads.make import make_heads
from build.heads.publish import as_published
from build.heads.settings import KINDS
from build.heads.sharpness import TRIED
from build.heads.sharpness import main as measure_again
from build.heads.target import FrozenTarget
from build.heads.teacher_forcing import all_rows, draft_logits
from build.sizes import folder_sizes
from build.workspace import MODELS
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.errors import ConfigError
from runtime.engine.torch_engine import load_draft
from runtime.models.heads.checkpoint.load import load_head
from runtime.models.heads.sharpness import LEAST, Sharpness
from tests.support.heads_training import CPU, STREAM, command, write_corpus
from tests.support.tiny_models import make_tiny_target


@pytest.fixture(scope="module")
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    main(command(folder, write_corpus(tmp_path_factory.mktemp("corpus")), out, "--ablation"))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_published_head_loads_and_says_what_the_trained_one_says(
    published: Path, folder: Path, target: FrozenTarget, kind: str
):
    loaded = load_head(kind, str(published / kind), str(folder), torch.float32, CPU)
    state = torch.load(published / ".train" / "heads" / "checkpoint.pt", weights_only=True)["model"]
    windows = torch.from_numpy(STREAM[:66].astype(np.int64)).view(2, 33)
    target.fit_scale(windows)
    batch = target.read(windows)
    options = parser().parse_args(command(folder, Path(), published))
    head = make_heads(target, settings_of(options, target), STREAM)[kind]
    head.load_state_dict({key.removeprefix(f"{kind}."): v for key, v in state.items() if key.startswith(f"{kind}.")})
    roots, stored = all_rows(32, 2, CPU), batch._replace(layers=batch.layers * target.layer_scale)
    with torch.no_grad():
        one = draft_logits(as_published(head), batch, roots, 2)
        other = draft_logits(loaded, stored, roots, 2)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert "lm_head.weight" not in state or kind == "eagle3"


def test_the_sharpness_of_a_head_is_recorded_with_its_files(published: Path, folder: Path, tmp_path: Path):
    for kind in KINDS:
        config = json.loads((published / kind / "config.json").read_text())
        assert config["sharpness"] == json.loads((published / kind / "provenance.json").read_text())["sharpness"]
        assert (
            load_head(kind, str(published / kind), str(folder), torch.float32, CPU).sharpness._asdict()
            == (config["sharpness"])
        )
    shutil.copytree(published / "eagle3", tmp_path / "eagle3")
    measured, others = config_without_sharpness(tmp_path / "eagle3")
    arguments = [str(tmp_path / "eagle3"), "--kind=eagle3", f"--target={folder}", f"--out={tmp_path}", "--windows=4"]
    arguments.append(f"--corpus={write_corpus(tmp_path)}")
    measure_again([*arguments, "--dry-run"])
    assert json.loads((tmp_path / "eagle3" / "config.json").read_text()) == others
    measure_again(arguments)
    found = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert found == others | {"sharpness": pytest.approx(measured, abs=0.1)}
    with pytest.raises(BuildError, match=r"has no config\.json"):
        measure_again([str(tmp_path), "--kind=eagle3"])


def test_the_sharpness_of_a_draft_model_is_measured_and_read_again(folder: Path, tmp_path: Path) -> None:
    """The target itself is right whenever it guesses, and its q is p, so it may be as sure as any value makes it."""
    draft = shutil.copytree(folder, tmp_path / "draft")
    arguments = [str(draft), "--kind=draft", f"--target={folder}", f"--out={tmp_path}", "--windows=4"]
    measure_again([*arguments, f"--corpus={write_corpus(tmp_path)}"])
    assert json.loads((draft / "config.json").read_text())["sharpness"] == {"argmax": min(TRIED), "sampled": LEAST}
    served = ServingConfig(target=str(folder), draft=str(draft), kv_memory_mb=1, dtype="float32")
    assert load_draft(served)._sharpness == Sharpness(min(TRIED), LEAST)
    config = json.loads((draft / "config.json").read_text()) | {"sharpness": {"argmax": 7}}
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"sharpness.argmax must be a number in 0\.01\.\.1, got 7"):
        load_draft(served)


def config_without_sharpness(folder: Path) -> tuple[dict, dict]:
    """Take the sharpness out of a head's config.json; return it, and the rest."""
    config = json.loads((folder / "config.json").read_text())
    measured = config.pop("sharpness")
    (folder / "config.json").write_text(json.dumps(config))
    return measured, config


def test_published_heads_are_up_to_date_until_the_settings_change(published: Path, folder: Path):
    assert up_to_date(command(folder, Path(), published))
    assert not up_to_date(command(folder, Path(), published, "--tokens=320"))
    assert not up_to_date(command(folder, Path(), published / "elsewhere"))


def test_head_of_another_target_is_refused_and_not_replaced(published: Path, folder: Path, tmp_path: Path):
    other = make_tiny_target(tmp_path / "other", seed=1, num_hidden_layers=7, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="was trained for another target"):
        load_head("medusa", str(published / "medusa"), str(other), torch.float32, CPU)
    with pytest.raises(BuildError, match="medusa holds a head of another target"):
        main(command(other, write_corpus(tmp_path), published, "--dry-run"))


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_head_loads_for_the_demo_target_within_its_ceiling(kind: str):
    load_head(kind, str(MODELS / kind), str(MODELS / "target"), torch.float32, CPU)
    assert next(row for row in folder_sizes(MODELS) if row.name == kind).fits


def test_shipped_heads_are_finished_and_of_the_present_settings():
    assert up_to_date([])
