"""The torch acceptance rules against the numpy reference: random trees, every rule, mixed batches, certain cases."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from auditor.reference.rules import KeyedNoise, accept_block, accept_rejection, accept_typical
from orchestrator.core.accept import AcceptedPath
from orchestrator.core.arrays import FloatArray
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution
from runtime.engine.sampling import accept
from runtime.engine.sampling.accept import AcceptInput, accepted_paths

RULES = (Rule.REJECTION, Rule.BLOCK, Rule.TYPICAL)


class Case(NamedTuple):
    """A step and its rows of log p, (m + 1, V)."""

    step: AcceptInput
    log_p: FloatArray


def dense(q: Distribution, vocab_size: int) -> FloatArray:
    probs = np.zeros(vocab_size)
    probs[q.ids] = q.probs
    return probs


def truth(case: Case) -> AcceptedPath:
    """The reference, on this step alone."""
    step, p = case.step, np.exp(case.log_p)
    draws = KeyedNoise(step.sampling.seed, step.prefix_len)
    if step.sampling.rule is Rule.TYPICAL:
        return accept_typical(step.tree, p, step.prefix_len, draws, step.sampling.epsilon, step.sampling.delta)
    q = np.full(p.shape, np.nan)  # rows without children must not be looked at
    for node, drawn_from in enumerate(step.q):
        q[step.tree.parents[node]] = dense(drawn_from, p.shape[1])
    if step.sampling.rule is Rule.REJECTION:
        return accept_rejection(step.tree, p, q if step.q else None, step.prefix_len, draws)
    if not step.q:
        q[: step.tree.num_nodes] = np.eye(p.shape[1])[step.tree.tokens]
    return accept_block(step.tree, p, q, step.prefix_len, draws)


def run(cases: list[Case]) -> list[AcceptedPath]:
    log_p = torch.from_numpy(np.concatenate([case.log_p for case in cases]))
    before = log_p.clone()
    found = accepted_paths([case.step for case in cases], log_p)
    assert torch.equal(log_p, before)  # the caller still needs it
    return found


# Random cases


def log_probs(rng: np.random.Generator, vocab_size: int) -> FloatArray:
    """A row of log p: flat or peaked, sometimes with zeros, sometimes a point mass."""
    with np.errstate(divide="ignore"):
        if rng.random() < 0.1:
            return np.log(np.eye(vocab_size)[rng.integers(vocab_size)])
        weights = rng.gamma(rng.choice([0.2, 1.0, 20.0]), size=vocab_size) + 1e-300
        if rng.random() < 0.3:
            weights[rng.random(vocab_size) < 0.5] = 0.0
            weights[rng.integers(vocab_size)] += 0.1
        return np.log(weights / weights.sum())


def distribution(rng: np.random.Generator, log_p: FloatArray, least: int) -> Distribution:
    """A q of `least` ids or more: near p, p's own digits, or anything, also outside of its support."""
    vocab_size = len(log_p)
    kind = rng.random()
    weights = np.exp(log_p) if kind < 0.6 else rng.gamma(0.5, size=vocab_size)
    if kind < 0.4:
        weights = weights * rng.gamma(3.0, size=vocab_size)
    if (weights.astype(np.float32) > 0).sum() < least or rng.random() < 0.2:
        weights = weights + rng.gamma(1.0, size=vocab_size) + 1e-3
    size = int(rng.integers(least, vocab_size + 1))
    ids = np.sort(np.argsort(-weights)[:size])
    ids = ids[weights[ids].astype(np.float32) > 0]
    return Distribution(ids.astype(np.int32), weights[ids].astype(np.float32))


def children_of(rng: np.random.Generator, log_p: FloatArray, width: int, q: Distribution | None) -> list[int]:
    """Distinct tokens, chosen: likely ones, or any; drawn: from q without replacement."""
    vocab_size = len(log_p)
    if q is None:
        likely = np.argsort(-log_p)[:width] if rng.random() < 0.7 else rng.permutation(vocab_size)[:width]
        return [int(token) for token in likely]
    return [int(token) for token in rng.choice(q.ids, size=width, replace=False, p=q.probs)]


def random_case(rng: np.random.Generator) -> Case:
    vocab_size = int(rng.integers(2, 41))
    return case_of(rng, vocab_size, Rule(rng.choice(RULES)), bool(rng.random() < 0.5))


def case_of(rng: np.random.Generator, vocab_size: int, rule: Rule, drawn: bool) -> Case:
    is_chain = rule is Rule.BLOCK or rng.random() < 0.3
    rows, tokens, parents, q = [log_probs(rng, vocab_size)], list[int](), list[int](), list[Distribution]()
    pending, most = [0], int(rng.integers(0, 7 if is_chain else 16))
    while pending and len(tokens) < most:
        parent = pending.pop(0)
        width = 1 if is_chain else int(rng.integers(1, min(5, vocab_size) + 1))
        own = distribution(rng, rows[parent], width) if drawn else None
        for token in children_of(rng, rows[parent], width, own):
            tokens.append(token)
            parents.append(parent)
            q += [] if own is None else [own]
            rows.append(log_probs(rng, vocab_size))
            if is_chain or rng.random() < 0.6:
                pending.append(len(tokens))
    tree = TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32))
    sampling = Sampling(
        temperature=1.0,
        rule=rule,
        seed=int(rng.choice([0, 1, 2**32 - 1, 2**63, 2**64 - 1, int(rng.integers(2**62))])),
        epsilon=float(rng.choice([0.09, 0.01, 0.5])),
        delta=float(rng.choice([0.3, 0.05, 0.9])),
    )
    prefix_len = int(rng.choice([0, 1, 2**16, 2**31 - 20, int(rng.integers(5000))]))
    return Case(AcceptInput(tree, tuple(q), prefix_len, sampling), np.array(rows))


def by_vocabulary(cases: list[Case]) -> list[list[Case]]:
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.log_p.shape[1], []).append(case)
    return list(groups.values())


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_accept_what_the_reference_accepts(seed: int) -> None:
    """Vocabularies of 2 to 40, all rules, chosen and drawn, chains and trees, bare roots, in batches of dozens."""
    rng = np.random.default_rng([41, seed])
    kinds = set()
    for cases in by_vocabulary([random_case(rng) for _ in range(1_500)]):
        found = run(cases)
        for case, accepted in zip(cases, found, strict=True):
            assert accepted == truth(case), case
            step = case.step
            kinds.add(
                (step.sampling.rule, bool(step.q), step.tree.is_chain, len(accepted.path) == step.tree.depths.max())
            )
    assert len(kinds) == 20  # every rule, drawn or not, chain or tree (block: chain), stopped or not


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drawn", [False, True])
def test_one_draft_under_many_seeds_is_accepted_as_by_the_reference(rule: Rule, drawn: bool) -> None:
    rng = np.random.default_rng([43, drawn])
    for _ in range(10):
        case = case_of(rng, int(rng.integers(2, 9)), rule, drawn)
        cases = [
            Case(replace(case.step, prefix_len=place, sampling=replace(case.step.sampling, seed=seed)), case.log_p)
            for place, seed in enumerate(rng.integers(2**62, size=60).tolist())
        ]
        assert run(cases) == [truth(each) for each in cases]


def test_a_path_does_not_depend_on_the_others_of_its_batch() -> None:
    rng = np.random.default_rng(47)
    cases = [case_of(rng, 12, Rule(rng.choice(RULES)), bool(rng.random() < 0.5)) for _ in range(300)]
    together = run(cases)
    order = rng.permutation(len(cases))
    assert run([cases[i] for i in order]) == [together[i] for i in order]
    assert [run([case])[0] for case in cases] == together


# Certain cases


def paths_by_seed(
    log_p: FloatArray, tree: TokenTree, rule: Rule, q: tuple[Distribution, ...] = ()
) -> list[AcceptedPath]:
    """The accepted paths of one draft under many seeds, equal to the reference's."""
    cases = [Case(AcceptInput(tree, q, 3, Sampling(1.0, rule=rule, seed=seed)), log_p) for seed in range(200)]
    found = run(cases)
    assert found == [truth(case) for case in cases]
    return found


def logs(*rows: list[float]) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows))


def weighted(weights: dict[int, float]) -> Distribution:
    return Distribution(np.array(list(weights), np.int32), np.array(list(weights.values()), np.float32))


def test_no_steps_accept_no_paths() -> None:
    assert accepted_paths([], torch.zeros(0, 4, dtype=torch.float64)) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_bare_root_recovers_from_p(rule: Rule) -> None:
    found = paths_by_seed(logs([0.0, 0.5, 0.5, 0.0]), TokenTree.bare(), rule)
    assert {accepted.next_token for accepted in found} == {1, 2}


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
@pytest.mark.parametrize("drawn", [False, True])
def test_at_temperature_0_the_point_mass_is_followed(rule: Rule, drawn: bool) -> None:
    rows = logs([0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0])
    for tokens, expected in (
        ([2, 1], AcceptedPath((1, 2), 0)),
        ([2, 0], AcceptedPath((1,), 1)),
        ([0, 1], AcceptedPath((), 2)),
    ):
        q = tuple(weighted({0: 1.0, 1: 2.0, 2: 3.0}) for _ in tokens) if drawn else ()
        assert set(paths_by_seed(rows, TokenTree.chain(tokens), rule, q)) == {expected}


def test_the_last_token_that_chosen_siblings_leave_is_certain_to_the_last_digit() -> None:
    """1 − the sum of the others would leave a last digit, or a tenth of a token of 1e-15, to chance."""
    rng = np.random.default_rng(59)
    for _ in range(200):
        weights = rng.gamma(0.1, size=6) + 1e-18
        left = torch.from_numpy(np.array([weights / weights.sum()] * 7))
        inputs = [
            AcceptInput(TokenTree.from_paths([[token] for token in rng.permutation(6).tolist()]), (), 0, Sampling(1.0))
        ]
        probabilities = accept._deterministic(left, accept._Nodes.of(inputs), inputs)
        assert probabilities[-1] == 1.0 and ((probabilities > 0.0) & (probabilities <= 1.0)).all()
        assert (left[0] == 0.0).all()
    tree = TokenTree.from_paths([[0], [1]])
    assert all(
        accepted.path for accepted in paths_by_seed(logs([0.3, 0.7, 0, 0], *[[0.25] * 4] * 2), tree, Rule.REJECTION)
    )


def test_impossible_drafts_are_refused_and_never_recovered() -> None:
    tree = TokenTree.from_paths([[2], [3]])
    rows = logs([0.4, 0.6, 0.0, 0.0], [0.25] * 4, [0.25] * 4)
    outside = weighted({2: 1.0, 3: 1.0})
    for q in ((), (outside, outside)):
        found = paths_by_seed(rows, tree, Rule.REJECTION, q)
        assert {accepted.path for accepted in found} == {()} and {accepted.next_token for accepted in found} == {0, 1}


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_a_drafter_that_is_the_target_is_always_right(rule: Rule) -> None:
    rows = logs(*[[0.5, 0.25, 0.125, 0.125]] * 3)
    same = weighted({0: 4.0, 1: 2.0, 2: 1.0, 3: 1.0})
    assert {accepted.path for accepted in paths_by_seed(rows, TokenTree.chain([3, 0]), rule, (same, same))} == {(1, 2)}


def test_typical_prefers_the_lowest_node_among_equals() -> None:
    rows = logs(*[[0.25] * 4] * 4)
    assert {accepted.path for accepted in paths_by_seed(rows, TokenTree.from_paths([[2], [3], [0]]), Rule.TYPICAL)} == {
        (1,)
    }
