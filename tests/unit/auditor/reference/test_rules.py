"""The acceptance rules, enumerated exactly: what is emitted has the target's law, whatever is drafted, for steps on end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import stats

from auditor.reference import rules as accept
from auditor.reference.noise import gumbel
from auditor.reference.rules import KeyedNoise, accept_block, accept_rejection, accept_typical
from orchestrator.core.accept import AcceptedPath, accept_coupled
from orchestrator.core.arrays import FloatArray
from orchestrator.core.noise import Stream
from orchestrator.core.tree import TokenTree
from tests.support.enumeration import Branch, law

EXACT = 1e-12
Rule = Callable[..., AcceptedPath]


def table(vocab_size: int, seed: int, zeros: bool = False) -> Callable[[Sequence[int]], FloatArray]:
    """A language: prefix → distribution, fixed by the last two tokens; with `zeros` some tokens are impossible."""

    def probs(prefix: Sequence[int]) -> FloatArray:
        rng = np.random.default_rng([seed, *(token + 1 for token in prefix[-2:])])
        weights = rng.gamma(0.7, size=vocab_size) + 1e-3
        if zeros:
            weights[rng.integers(vocab_size)] = 0.0
        return weights / weights.sum()

    return probs


@dataclass(frozen=True)
class Drafter:
    """How a tree is made: sampled from q without replacement, or deterministic; `branching` children by depth."""

    branching: tuple[int, ...]
    sampled: bool

    def draft(self, branch: Branch, prefix: list[int], q: Callable[[Sequence[int]], FloatArray]) -> TokenTree:
        paths: list[list[int]] = [[]]
        tokens, parents, ids = list[int](), list[int](), {(): 0}
        for width in self.branching:
            grown = []
            for path in paths:
                for token in self._children(branch, q([*prefix, *path]), width):
                    tokens.append(token)
                    parents.append(ids[tuple(path)])
                    ids[(*path, token)] = len(tokens)
                    grown.append([*path, token])
            paths = grown
        return TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32))

    def _children(self, branch: Branch, q: FloatArray, width: int) -> list[int]:
        if not self.sampled:
            return [int(token) for token in np.argsort(-q)[:width] if q[token] > 0]
        found: list[int] = []
        while len(found) < width and q.sum() > 0:
            found.append(branch.choose(q))
            q = np.where(np.arange(len(q)) == found[-1], 0.0, q)
        return found


def prefixes(prefix: list[int], tree: TokenTree) -> list[list[int]]:
    found = [prefix]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append([*found[parent], token])
    return found


def rejection(drafter: Drafter) -> Rule:
    def rule(tree: TokenTree, p: FloatArray, q: FloatArray, position: int, noise: Any) -> AcceptedPath:
        return accept_rejection(tree, p, q if drafter.sampled else None, position, noise)

    return rule


def block(drafter: Drafter) -> Rule:
    def rule(tree: TokenTree, p: FloatArray, q: FloatArray, position: int, noise: Any) -> AcceptedPath:
        if not drafter.sampled:  # a deterministic chain is sampled from point masses
            q = np.array([np.eye(p.shape[1])[token] for token in [*tree.tokens.tolist(), 0]])
        return accept_block(tree, p, q, position, noise)

    return rule


def step_law(rule: Rule, drafter: Drafter, p: Any, q: Any, prefix: list[int]) -> dict[tuple[int, ...], float]:
    """The law of what one step emits, over drafts and decisions."""

    def step(branch: Branch) -> tuple[int, ...]:
        tree = drafter.draft(branch, prefix, q)
        rows = prefixes(prefix, tree)
        accepted = rule(tree, np.array([p(r) for r in rows]), np.array([q(r) for r in rows]), len(prefix), branch)
        return (*(int(tree.tokens[node - 1]) for node in accepted.path), accepted.next_token)

    return law(step)


def emitted_law(
    rule: Rule, drafter: Drafter, p: Any, q: Any, num_tokens: int, prefix: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The law of the first `num_tokens` tokens of several steps in a row, whose noise is independent."""
    if len(prefix) >= num_tokens:
        return {prefix[:num_tokens]: 1.0}
    found: dict[tuple[int, ...], float] = {}
    for tokens, probability in step_law(rule, drafter, p, q, list(prefix)).items():
        for whole, rest in emitted_law(rule, drafter, p, q, num_tokens, prefix + tokens).items():
            found[whole] = found.get(whole, 0.0) + probability * rest
    return found


def target_law(p: Any, vocab_size: int, num_tokens: int) -> dict[tuple[int, ...], float]:
    found = {}
    for tokens in itertools.product(range(vocab_size), repeat=num_tokens):
        found[tokens] = float(np.prod([p(tokens[:i])[token] for i, token in enumerate(tokens)]))
    return found


def distance(left: dict[Any, float], right: dict[Any, float]) -> float:
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in left.keys() | right.keys())


CHAINS = [Drafter((1,) * length, sampled) for length in (1, 2, 3) for sampled in (True, False)]
TREES = [Drafter(branching, sampled) for branching in ((2,), (3,), (2, 1), (2, 2)) for sampled in (True, False)]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("drafter", [*CHAINS, *TREES], ids=str)
def test_rejection_emits_the_target_s_law(drafter: Drafter, zeros: bool) -> None:
    p, q = table(3, 1, zeros), table(3, 2, zeros)
    found = emitted_law(rejection(drafter), drafter, p, q, 2)
    assert distance(found, target_law(p, 3, 2)) < EXACT


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("drafter", CHAINS, ids=str)
def test_block_emits_the_target_s_law(drafter: Drafter, zeros: bool) -> None:
    p, q = table(3, 3, zeros), table(3, 4, zeros)
    found = emitted_law(block(drafter), drafter, p, q, 3)
    assert distance(found, target_law(p, 3, 3)) < EXACT


@pytest.mark.parametrize(
    ("rule", "vocab_size", "length"), [(rejection, 5, 2), (block, 5, 2), (rejection, 2, 4), (block, 2, 4)]
)
def test_larger_vocabularies_and_longer_drafts(rule: Any, vocab_size: int, length: int) -> None:
    drafter, p, q = Drafter((1,) * length, True), table(vocab_size, 5), table(vocab_size, 6)
    num_tokens = 2 if vocab_size == 5 else 4
    found = emitted_law(rule(drafter), drafter, p, q, num_tokens)
    assert distance(found, target_law(p, vocab_size, num_tokens)) < EXACT


def test_block_accepts_more_than_rejection_by_the_published_figures() -> None:
    """Target (1/3, 2/3), draft (2/3, 1/3), γ = 2: 11/9 accepted tokens against 10/9."""
    p, q = (lambda prefix: np.array([1, 2]) / 3), (lambda prefix: np.array([2, 1]) / 3)
    drafter = Drafter((1, 1), True)

    def accepted(rule: Rule) -> float:
        def one(branch: Branch) -> int:
            tree = drafter.draft(branch, [], q)
            rows = prefixes([], tree)
            return len(rule(tree, np.array([p(r) for r in rows]), np.array([q(r) for r in rows]), 0, branch).path)

        return sum(number * probability for number, probability in law(one).items())

    assert accepted(rejection(drafter)) == pytest.approx(10 / 9, abs=EXACT)
    assert accepted(block(drafter)) == pytest.approx(11 / 9, abs=EXACT)


def test_rejection_of_one_draft_accepts_with_one_minus_total_variation() -> None:
    p, q = table(5, 7)([]), table(5, 8)([])
    drafter = Drafter((1,), True)
    found = law(
        lambda branch: len(
            accept_rejection(
                drafter.draft(branch, [], lambda prefix: q), np.stack([p, p]), np.stack([q, q]), 0, branch
            ).path
        )
    )
    assert found[1] == pytest.approx(np.minimum(p, q).sum(), abs=EXACT)


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_point_mass_is_followed_and_nothing_else(rule: Any) -> None:
    """Temperature 0: every distribution is a point mass, so the text is the greedy one."""

    def greedy(prefix: Sequence[int]) -> FloatArray:
        return np.eye(4)[table(4, 9)(prefix).argmax()]

    for other in (greedy, lambda prefix: np.eye(4)[1], table(4, 10)):
        drafter = Drafter((1, 1), True)
        found = emitted_law(rule(drafter), drafter, greedy, other, 4)
        assert found == {max(target_law(greedy, 4, 4).items(), key=lambda item: item[1])[0]: pytest.approx(1.0)}


# Planted bugs: each must show


Trials = Iterator[tuple[float, FloatArray]]


def recover_from_p(trials: Trials, p: FloatArray, tokens: Sequence[int]) -> Trials:
    return ((probability, p) for probability, _ in trials)


def keep_the_sibling(trials: Trials, p: FloatArray, tokens: Sequence[int]) -> Trials:
    """The mass of a rejected sibling stays: its residual is the one before it."""
    residuals = [p, *(residual for _, residual in trials)]
    return zip([*p[tokens].tolist(), 0.0], residuals, strict=False)


def accept_with_p(trials: Trials, p: FloatArray, tokens: Sequence[int]) -> Trials:
    return zip([*p[tokens].tolist(), 0.0], (residual for _, residual in trials), strict=True)


def accept_all(trials: Trials, p: FloatArray, tokens: Sequence[int]) -> Trials:
    return ((1.0, residual) for _, residual in trials)


@pytest.mark.parametrize(
    ("name", "bug", "drafter"),
    [
        ("_sampled", recover_from_p, Drafter((1,), True)),
        ("_deterministic", recover_from_p, Drafter((2,), False)),
        ("_sampled", keep_the_sibling, Drafter((3,), True)),
        ("_sampled", accept_with_p, Drafter((1,), True)),
        ("_deterministic", accept_all, Drafter((1,), False)),
    ],
)
def test_a_planted_bug_in_rejection_leaves_the_law(
    monkeypatch: pytest.MonkeyPatch, name: str, bug: Any, drafter: Drafter
) -> None:
    sound = getattr(accept, name)
    monkeypatch.setattr(accept, name, lambda p, *rest: bug(sound(p, *rest), p, rest[-1]))
    p, q = table(3, 1), table(3, 2)
    found = emitted_law(rejection(drafter), drafter, p, q, 2)
    assert distance(found, target_law(p, 3, 2)) > 1e-3


@pytest.mark.parametrize("factor", [0.5, 0.9])
def test_a_planted_bug_in_block_leaves_the_law(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    sound = accept._block_probability
    monkeypatch.setattr(accept, "_block_probability", lambda joint, p, q: factor * sound(joint, p, q))
    drafter, p, q = Drafter((1, 1), True), table(3, 3), table(3, 4)
    assert distance(emitted_law(block(drafter), drafter, p, q, 3), target_law(p, 3, 3)) > 1e-3


# Keyed noise


NUM_SEEDS = 3_000


@pytest.mark.parametrize("rule", [rejection, block])
def test_keyed_draws_emit_the_target_s_law_over_seeds(rule: Any) -> None:
    """First two tokens over seeds; each step has its own prefix_len, and drafts their own stream."""
    drafter, p, q = Drafter((1, 1), True), table(3, 11), table(3, 12)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(NUM_SEEDS):
        ids: list[int] = []
        while len(ids) < 2:
            chain: list[int] = []
            for offset in range(2):
                noise = gumbel(seed, len(ids) + offset, np.arange(3), Stream.DRAFT, len(ids))
                chain.append(int((np.log(q([*ids, *chain])) + noise).argmax()))
            tree = TokenTree.chain(chain)
            rows = prefixes(ids, tree)
            arrays = np.array([p(r) for r in rows]), np.array([q(r) for r in rows])
            accepted = rule(drafter)(tree, *arrays, len(ids), KeyedNoise(seed, len(ids)))
            ids += [chain[node - 1] for node in accepted.path] + [accepted.next_token]
        counts[tuple(ids[:2])] = counts.get(tuple(ids[:2]), 0) + 1
    expected = target_law(p, 3, 2)
    observed = [counts.get(tokens, 0) for tokens in expected]
    assert stats.chisquare(observed, [NUM_SEEDS * value for value in expected.values()]).pvalue > 1e-3


def test_keyed_draws_accept_what_is_certain_and_never_what_is_impossible() -> None:
    for seed in range(200):
        noise = KeyedNoise(seed, 5)
        assert noise.accept(1.0, 5, 0) and not noise.accept(0.0, 5, 0)
        assert noise.recover(np.array([0.0, 0.0, 0.3]), 6) == 2


# Coupled and typical


def test_coupled_descends_while_the_pick_is_a_child() -> None:
    tree = TokenTree.from_paths([[5, 6], [7]])
    assert accept_coupled(tree, [5, 6, 9, 0]) == AcceptedPath((1, 2), 9)
    assert accept_coupled(tree, [8, 6, 9, 0]) == AcceptedPath((), 8)


def test_typical_takes_the_longest_path_of_tokens_that_are_probable_enough() -> None:
    flat, sharp = np.full(4, 0.25), np.array([0.91, 0.03, 0.03, 0.03])
    tree = TokenTree.from_paths([[1, 2], [0]])
    one = TokenTree.from_paths([[1], [0]])
    sure = KeyedNoise(0, 0)
    # Where anything may follow (H = ln 4, the threshold is 0.075) all are accepted; where p is sharp only the likely.
    assert accept_typical(tree, np.stack([flat, flat, sharp, flat]), 0, sure).path == (1, 2)
    assert accept_typical(tree, np.stack([sharp, flat, flat, flat]), 0, sure).path == (3,)
    # Of paths of one length the likeliest.
    p0 = np.array([0.5, 0.3, 0.1, 0.1])
    assert accept_typical(one, np.stack([p0, flat, flat]), 0, sure).path == (2,)


def test_typical_has_not_the_target_s_law() -> None:
    """It is lossy, and named so."""
    p, drafter = table(3, 1), Drafter((1,), False)

    def typical(tree: TokenTree, p: FloatArray, q: FloatArray, position: int, noise: Any) -> AcceptedPath:
        return accept_typical(tree, p, position, noise)

    assert distance(emitted_law(typical, drafter, p, p, 2), target_law(p, 3, 2)) > 1e-2
