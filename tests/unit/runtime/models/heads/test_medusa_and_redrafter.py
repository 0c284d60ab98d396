"""The engines of Medusa and ReDrafter, against forward passes written from the equations by another hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from auditor.reference import noise
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.static_trees import tree_of_choices
from orchestrator.core.tree import TokenTree
from runtime.models.heads.engines.medusa import MedusaEngine
from runtime.models.heads.engines.redrafter import RedrafterEngine
from tests.support import heads_oracle as oracle
from tests.support.choice_trees import published_choices
from tests.support.eagle_heads import Path_, random_context
from tests.support.heads import (
    HIDDEN_SIZE,
    draft,
    load,
    make_head,
    paths_of,
    request,
    tables,
)
from tests.support.tiny_models import VOCAB_SIZE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 2, "num_layers": 2, "repeated_block": False, "file": "pt"},
        {"config_num_heads": 2, "dtype": "float16"},
        {"lm_heads": False},
    ],
)
def test_medusa_says_what_its_equations_say(tmp_path: Path, target: Path, options: dict[str, Any]) -> None:
    heads = load("medusa", make_head("medusa", tmp_path, **options), target)
    h = np.random.default_rng(1).normal(0, 1, HIDDEN_SIZE)
    expected = oracle.medusa_logits(oracle.read_tensors(tmp_path), h, tables(target)[1])
    logits = torch.stack([head(torch.from_numpy(h)) for head in heads])
    assert np.abs(logits.numpy() - expected).max() < 1e-9


def test_medusa_crosses_its_heads_into_the_tree_of_the_choices(tmp_path: Path, target: Path) -> None:
    engine = MedusaEngine(load("medusa", make_head("medusa", tmp_path), target))
    ids, features = random_context(6, HIDDEN_SIZE)
    choices = tree_of_choices(published_choices("medusa_mc_sim_7b_63"))
    calls = [request(ids, features[-1:], start=4, sequence_id=n, choices=choices, max_nodes=63) for n in (1, 2)]
    h = features[-1].astype(np.float32).astype(np.float64)
    best = np.argsort(-oracle.medusa_logits(oracle.read_tensors(tmp_path), h, None), axis=-1)
    expected = [tuple(int(best[k, rank]) for k, rank in enumerate(path)) for path in choices.paths[1:]]
    assert [paths_of(answer) for answer in draft(engine, *calls)] == [expected, expected]


def test_medusa_s_tree_ends_with_its_last_head(tmp_path: Path, target: Path) -> None:
    engine = MedusaEngine(load("medusa", make_head("medusa", tmp_path, num_heads=2), target))
    ids, features = random_context(6, HIDDEN_SIZE)
    (answer,) = draft(engine, request(ids, features[-1:], start=4, choices=TokenTree.chain([0, 0, 0, 0])))
    assert answer.tree.num_nodes == 2


@pytest.mark.parametrize("options", [{}, {"exit_dim": 48, "num_layers": 2}, {"rnn": False, "file": "pt"}])
def test_redrafter_s_tree_is_its_beams_prefixes(tmp_path: Path, target: Path, options: dict[str, Any]) -> None:
    engine = RedrafterEngine(load("redrafter", make_head("redrafter", tmp_path, **options), target))
    ids, features = random_context(6, HIDDEN_SIZE)
    tensors, config = oracle.read_tensors(tmp_path), oracle.read_config(tmp_path)
    h = features[-1].astype(np.float32).astype(np.float64)
    model = (tensors, config, tables(target)[0], h, ids[-1])

    def score(path: Path_) -> float:
        return sum(oracle.redrafter_log_probs(*model, path[:n])[path[n]] for n in range(len(path)))

    beams = oracle.redrafter_beams(*model, 4, 3)
    best_first = sorted({path[:n] for path, _ in beams for n in (1, 2, 3)}, key=score, reverse=True)
    for max_nodes in (60, len(best_first) - 2, 3):
        call = request(ids, features[-1:], start=4, width=4, max_depth=3, max_nodes=max_nodes)
        assert paths_of(draft(engine, call)[0]) == best_first[:max_nodes]


def test_a_head_without_the_newest_state_drafts_nothing(tmp_path: Path, target: Path) -> None:
    engine = RedrafterEngine(load("redrafter", make_head("redrafter", tmp_path), target))
    ids, features = random_context(6, HIDDEN_SIZE)
    for call in (request(ids, None, width=2), request(ids, features[-1:], start=3, width=2)):
        (answer,) = draft(engine, call)
        assert (answer.tree.num_nodes, answer.cached_len) == (0, 5)


def test_requests_of_all_kinds_share_a_pass_without_harm(tmp_path: Path, target: Path) -> None:
    """Medusa and ReDrafter, mixed temperatures, seeds, lengths and shapes: together as alone."""
    engines: list[Any] = [
        MedusaEngine(load("medusa", make_head("medusa", tmp_path / "m"), target)),
        RedrafterEngine(load("redrafter", make_head("redrafter", tmp_path / "r"), target)),
    ]
    samplings = [
        Sampling(),
        Sampling(0.9, seed=3),
        Sampling(1.2, top_k=2, seed=4),
        Sampling(0.7, seed=3, rule=Rule.REJECTION),
    ]
    for engine in engines:
        calls = []
        for number, sampling in enumerate(samplings * 2):
            ids, features = random_context(5 + number, HIDDEN_SIZE, number)
            shape: dict[str, Any] = (
                {"width": 1 + number % 3} if number < 4 else {"choices": tree_of_choices([[0, 0], [1, 0], [2]])}
            )
            shape |= {"start": 3 + number, "sequence_id": number + 1, "sampling": sampling, "max_depth": 3}
            calls.append(request(ids, features[-1:], **shape))
        together = [paths_of(answer) for answer in draft(engine, *calls)]
        assert together == [paths_of(draft(engine, call)[0]) for call in calls]
        assert len(set(map(tuple, together))) == len(together)


def test_medusa_and_redrafter_use_the_target_s_noise_at_each_token_s_place(tmp_path: Path, target: Path) -> None:
    ids, features = random_context(6, HIDDEN_SIZE)
    sampling = Sampling(1.0, seed=9)
    h = features[-1].astype(np.float32).astype(np.float64)
    medusa, redrafter = make_head("medusa", tmp_path / "m"), make_head("redrafter", tmp_path / "r")

    def best(logits: np.ndarray, depth: int) -> int:
        noisy = oracle.log_softmax(logits) + noise.gumbel(9, 6 + depth, np.arange(VOCAB_SIZE), noise.Stream.TARGET)
        return int(noisy.argmax())

    chain = TokenTree.chain([0, 0, 0])
    (answer,) = draft(
        MedusaEngine(load("medusa", medusa, target)),
        request(ids, features[-1:], start=4, sampling=sampling, choices=chain),
    )
    logits = oracle.medusa_logits(oracle.read_tensors(medusa), h)
    assert answer.tree.tokens.tolist() == [best(logits[k], k) for k in range(3)]

    (answer,) = draft(
        RedrafterEngine(load("redrafter", redrafter, target)),
        request(ids, features[-1:], start=4, sampling=sampling, width=1, max_depth=3),
    )
    path: list[int] = []
    for depth in range(3):
        tensors, config = oracle.read_tensors(redrafter), oracle.read_config(redrafter)
        path.append(best(oracle.redrafter_logits(tensors, config, tables(target)[0], h, ids[-1], path), depth))
    assert answer.tree.tokens.tolist() == path
