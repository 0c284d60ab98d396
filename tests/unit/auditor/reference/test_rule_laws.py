"""The laws of the rules as served, over 150,000 seeds; planted bugs must leave them over 50,000.

A million seeds: `python -m tests.laws`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Sampling
from runtime.engine.sampling import accept, noise, served
from runtime.engine.sampling.accept import AcceptInput
from runtime.engine.sampling.noise import gumbel, uniform
from runtime.engine.sampling.served import target_tokens
from tests.support.rule_laws import (
    BLOCK,
    BLOCK_KEYED_BY_POSITION,
    CHAIN,
    CHUNK,
    COUPLED,
    DETERMINISTIC,
    GOLDEN_P,
    GOLDEN_RATES,
    SETTINGS,
    SIBLINGS,
    START,
    Distance,
    Language,
    Setting,
    emitted,
    golden,
    lopsided,
    mixed,
)

NUM_DRAWS, NUM_FEWER, NUM_PLANTED = 150_000, 60_000, 50_000
EACH_RULE = (COUPLED, CHAIN, BLOCK)  # the others over fewer seeds

pytestmark = [pytest.mark.usefixtures("without_collector"), pytest.mark.timeout(600)]


# The laws


@pytest.mark.parametrize("setting", [COUPLED, CHAIN, SIBLINGS, DETERMINISTIC, BLOCK], ids=str)
def test_the_first_token_has_the_target_s_law_on_the_golden_pair(setting: Setting) -> None:
    counts, acceptance = emitted(setting.single, golden(), 1, NUM_DRAWS)
    found = Distance.between(counts, golden().law(1))
    assert found.is_chance, found
    if setting in EACH_RULE:
        rate = GOLDEN_RATES.get(setting.rule, 0.5)  # of one token, block verification is rejection
        assert abs(acceptance - rate) < 4 * np.sqrt(rate * (1 - rate) / NUM_DRAWS)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_three_tokens_of_several_steps_have_the_target_s_joint_law(setting: Setting) -> None:
    language = mixed()
    counts, _ = emitted(setting, language, 3, NUM_DRAWS if setting in EACH_RULE else NUM_FEWER)
    found = Distance.between(counts, language.law(3))
    assert found.is_chance, found
    first = Distance.between(counts.reshape(5, 25).sum(axis=1), language.law(1))
    assert first.is_chance, first


def test_picks_at_two_positions_are_independent_and_have_the_law() -> None:
    log_p = torch.from_numpy(np.log(GOLDEN_P)).expand(2 * CHUNK, -1)
    counts = np.zeros((8, 8), np.int64)
    for first in range(0, NUM_DRAWS // 2, CHUNK):
        rules = [Sampling(1.0, seed=seed) for seed in range(first, first + CHUNK)]
        found = np.array(target_tokens(log_p, [START] * CHUNK + [START + 1] * CHUNK, rules * 2)).reshape(2, CHUNK)
        np.add.at(counts, tuple(found), 1)
    assert stats.chi2_contingency(counts).pvalue > 1e-4
    for own in (counts.sum(axis=0), counts.sum(axis=1)):
        assert Distance.between(own, GOLDEN_P).is_chance


# Planted bugs: each has been another server's, and must show


def recovery_from_the_drafts_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "gumbel", lambda *key: gumbel(*key[:3], Stream.DRAFT, key[4]))


def recovery_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "_residual", lambda p, q: p)


def residual_not_renormalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "_norm", lambda weights: weights)


def keys_without_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "uniform", lambda *key: uniform(*key[:4], 0))
    monkeypatch.setattr(noise, "gumbel", lambda *key: gumbel(*key[:4], 0))


def replace_rule(monkeypatch: pytest.MonkeyPatch, name: str, bug: Callable[..., Tensor]) -> None:
    sound = getattr(accept, name)
    rules = tuple((is_mine, bug if rule is sound else rule) for is_mine, rule in accept._RULES)
    monkeypatch.setattr(accept, "_RULES", rules)


def sibling_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_rule(monkeypatch, "_deterministic", lambda p, nodes, inputs: p[nodes.parents, nodes.tokens])


def token_chances_in_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(p: Tensor, nodes: Any, inputs: Sequence[AcceptInput]) -> Tensor:
        probabilities = accept._sampled(p.clone(), nodes, inputs)
        accept._block(p, nodes, inputs)
        return probabilities

    replace_rule(monkeypatch, "_block", bug)


@pytest.mark.parametrize(
    ("bug", "setting", "made"),
    [
        (recovery_from_the_drafts_noise, CHAIN, lopsided),
        (recovery_from_the_drafts_noise, SIBLINGS, lopsided),
        (recovery_from_the_drafts_noise, BLOCK, lopsided),
        (recovery_from_p, CHAIN, mixed),
        (recovery_from_p, SIBLINGS, mixed),
        (recovery_from_p, BLOCK, mixed),
        (residual_not_renormalised, SIBLINGS, lopsided),
        (sibling_not_removed, DETERMINISTIC, mixed),
        (keys_without_the_step, BLOCK_KEYED_BY_POSITION, mixed),
        (token_chances_in_block, BLOCK, mixed),
    ],
    ids=lambda value: str(value) if isinstance(value, Setting) else value.__name__,
)
def test_a_planted_bug_leaves_the_law(
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    setting: Setting,
    made: Callable[[], Language],
) -> None:
    monkeypatch.setattr(served, "on_cpu", lambda _: False)  # the bugs are planted into torch's functions
    bug(monkeypatch)
    num_tokens = 2 if made is lopsided else 3  # the fewest in which the bug is plain
    counts, _ = emitted(setting, made(), num_tokens, NUM_PLANTED)
    found = Distance.between(counts, made().law(num_tokens))
    assert found.is_bias, found
