"""Heads' checkpoints that do not fit, are broken or were trained for another target are refused with the reason."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.core.errors import ConfigError
from runtime.models.heads.checkpoint.target_tables import fingerprint
from tests.support.heads import load, make_head, make_target
from tests.support.tiny_models import VOCAB_SIZE

KINDS = ("medusa", "eagle", "eagle3", "redrafter")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def weights(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of a head's file by name, `__` for a dot; None takes one out."""
    found = load_file(weights(folder))
    for name, tensor in tensors.items():
        found.pop(name.replace("__", "."), None)
        if tensor is not None:
            found[name.replace("__", ".")] = tensor
    save_file(found, weights(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["safetensors", "pt"])
def test_every_published_file_is_read(tmp_path: Path, target: Path, kind: str, file: str) -> None:
    assert sum(p.numel() for p in load(kind, make_head(kind, tmp_path, file=file), target).parameters()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_for_another_hidden_size_is_refused_with_both(
    tmp_path: Path, target: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    other = make_target(tmp_path_factory.mktemp("other"), hidden_size=64)
    with pytest.raises(ConfigError, match="32") as error:
        load(kind, make_head(kind, tmp_path), other)
    assert "64" in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_for_another_vocabulary_is_refused_with_both(
    tmp_path: Path, target: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    other = make_target(tmp_path_factory.mktemp("other"), vocab_size=70)
    with pytest.raises(ConfigError, match=f"{VOCAB_SIZE}.*70|outside"):
        load(kind, make_head(kind, tmp_path), other)


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}},
    ],
)
def test_an_eagle3_head_of_another_layout_is_refused(tmp_path: Path, target: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"expected \[2, 4, 5\]"):
        load("eagle3", make_head("eagle3", tmp_path, changes=changes), target)


@pytest.mark.parametrize(
    ("norms", "changes", "words"),
    [
        (("fc_norm", "norm_before_fc"), {}, "fc_norm and norm_before_fc exclude each other"),
        (("fc_norm",), {"fc_norm": False}, r"fc_norm\.0\.weight is there, but fc_norm is not true"),
        (("norm_before_fc",), {"norm_before_fc": None}, r"input_norm\.weight is there, but norm_before_fc is not true"),
        ((), {"fc_norm": True}, r"lacks 'fc_norm\.0\.weight'"),
        ((), {"eagle_config": {"norm_before_fc": True}}, r"lacks 'input_norm\.weight'"),
        ((), {"norm_output": "yes"}, "norm_output must be true or false, got 'yes'"),
    ],
)
def test_an_eagle31_head_whose_keys_and_tensors_disagree_is_refused(
    tmp_path: Path, target: Path, norms: tuple[str, ...], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load("eagle3", make_head("eagle3", tmp_path, norms=norms, changes=changes), target)


@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        (torch.cat([torch.zeros(47, dtype=torch.long), torch.tensor([-1])]), "two draft ids to one token"),
        (torch.zeros(48, dtype=torch.long), "d2t and t2d do not name the same"),
        (torch.zeros(48), "d2t is torch.float32, expected torch.int64"),
    ],
)
def test_a_draft_vocabulary_that_cannot_be_is_refused(
    tmp_path: Path, target: Path, d2t: torch.Tensor, words: str
) -> None:
    make_head("eagle3", tmp_path, file="safetensors")
    change(tmp_path, d2t=d2t)
    with pytest.raises(ConfigError, match=words):
        load("eagle3", tmp_path, target)


def test_non_finite_weights_are_refused(tmp_path: Path, target: Path) -> None:
    make_head("redrafter", tmp_path)
    change(tmp_path, rnn_w__weight=torch.full((32, 32), torch.nan))
    with pytest.raises(ConfigError, match=r"rnn_w\.weight has numbers that are not finite"):
        load("redrafter", tmp_path, target)


def test_an_eagle_head_of_two_layers_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 2, but heads of 1"):
        load("eagle", make_head("eagle", tmp_path, num_layers=2, file="safetensors"), target)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("medusa", "1.0.linear.weight"),
        ("eagle", "layers.0.mlp.up_proj.weight"),
        ("eagle3", "midlayer.hidden_norm.weight"),
        ("redrafter", "rnn_w.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, target: Path, kind: str, name: str) -> None:
    make_head(kind, tmp_path, file="safetensors")
    change(tmp_path, **{name.replace(".", "__"): None})
    with pytest.raises(ConfigError, match=name):
        load(kind, tmp_path, target)


def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path: Path, target: Path) -> None:
    make_head("redrafter", tmp_path)
    change(tmp_path, rnn_w__weight=torch.ones(3, 32))
    with pytest.raises(ConfigError, match=r"rnn_w.weight has the shape \(3, 32\), expected \(32, 32\)"):
        load("redrafter", tmp_path, target)


def test_a_map_that_leads_out_of_the_vocabulary_is_refused(tmp_path: Path, target: Path) -> None:
    make_head("eagle3", tmp_path, file="safetensors")
    change(tmp_path, d2t=torch.full((48,), 60))
    with pytest.raises(ConfigError, match="outside the target's vocabulary"):
        load("eagle3", tmp_path, target)


def test_a_head_trained_for_another_target_is_refused(
    tmp_path: Path, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    make_head("redrafter", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"target_fingerprint": fingerprint(str(target))}))
    load("redrafter", tmp_path, target)
    other = make_target(tmp_path_factory.mktemp("twin"), seed=1)
    with pytest.raises(ConfigError, match="trained for another target"):
        load("redrafter", tmp_path, other)


def test_pickled_code_is_not_run(tmp_path: Path, target: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "pytorch_model.bin").open("wb") as stream:
        pickle.dump({"fc.weight": Evil()}, stream, protocol=2)
    with pytest.raises(ConfigError, match="cannot be read"):
        load("eagle", tmp_path, target)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_that_was_measured_has_the_best_tree_for_its_own(tmp_path: Path, target: Path, kind: str) -> None:
    make_head(kind, tmp_path)
    accuracy = [[0.9, 0.0], [0.5, 0.4]]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"accuracy": accuracy}))
    assert load(kind, tmp_path, target).default_choices.paths[1:4] == [(0,), (0, 0), (0, 1)]
