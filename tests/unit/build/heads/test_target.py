"""The frozen target that heads are trained on: its states and probabilities are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from build.errors import BuildError
from build.heads.settings import ABLATED
from build.heads.target import FrozenTarget, load_target
from build.heads.train import begin_run
from runtime.models.features import layers_of
from tests.support.heads_training import STREAM, TINY
from tests.support.tiny_models import make_tiny_target


def test_target_is_read_as_transformers_says_it(target: FrozenTarget):
    windows = torch.from_numpy(STREAM[:66].astype(np.int64)).view(2, 33)
    read = target.read(windows)
    with torch.no_grad():
        whole = target.model(input_ids=windows[:, :-1], output_hidden_states=True)
    torch.testing.assert_close(read.last, whole.hidden_states[-1])
    inputs = torch.cat([whole.hidden_states[layer] for layer in layers_of(7)], dim=-1)
    torch.testing.assert_close(read.layers * target.layer_scale, inputs)
    torch.testing.assert_close(read.p, whole.logits.softmax(-1))


def test_states_of_layers_are_scaled_to_about_one_by_a_power_of_two(target: FrozenTarget):
    windows = torch.from_numpy(STREAM[:66].astype(np.int64)).view(2, 33)
    target.fit_scale(windows)
    assert np.log2(target.layer_scale) % 1 == 0
    assert 0.7 < float(target.read(windows).layers.square().mean().sqrt()) < 1.5
    scale = target.layer_scale
    target.fit_scale(windows)
    assert target.layer_scale == scale


def test_target_continues_with_its_most_likely_tokens(target: FrozenTarget):
    start = torch.from_numpy(STREAM[:10].astype(np.int64))[None]
    tokens = target.continued(start, 5)
    with torch.no_grad():
        target_tokens = target.model(input_ids=tokens).logits.argmax(-1)
    assert tokens.shape == (1, 15)
    assert tokens[:, 10:].tolist() == target_tokens[:, 9:14].tolist()


def test_target_of_too_few_layers_trains_all_heads_but_eagle3(tmp_path: Path):
    shallow = make_tiny_target(tmp_path / "shallow")
    with pytest.raises(BuildError, match="has 3 layers, at least 7 are needed"):
        load_target(str(shallow), "cpu", reads_layers=True)
    run = begin_run(
        replace(TINY, kinds=("medusa", "eagle", "redrafter")), load_target(str(shallow), "cpu", False), STREAM, ""
    )
    assert set(run.train_step()) == {"medusa", "eagle", "redrafter", ABLATED}
