"""The laws of the rules as served, over hundreds of thousands of seeds; the seeds are 0, 1, 2 …: nothing is random.

Two measures: total variation beside its floor, which is what chance alone makes of it (its expected value at this
number of draws), and the p-value of a chi-square test. Planted bugs must leave both by far.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from orchestrator.accept import Walk, accept_coupled
from orchestrator.noise import Stream
from orchestrator.tree import TokenTree
from orchestrator.types import Distribution, FloatArray, Rule, Sampling
from runtime import accept, noise
from runtime.accept import Ask, walks
from runtime.noise import gumbel, seed_words, uniform
from runtime.sampling import picks

NUM_FIRST, NUM_JOINT, NUM_PLANTED = 1_000_000, 150_000, 50_000
CHUNK = 25_000
START = 7  # tokens that stand before the first one drawn
CPU = torch.device("cpu")

#: The pair whose rates are known: rejection accepts 1 − TV, coupled noise Σ 1 / Σ max(pⱼ/pᵢ, qⱼ/qᵢ).
GOLDEN_P = np.array([0.30, 0.20, 0.15, 0.10, 0.10, 0.05, 0.05, 0.05])
GOLDEN_Q = GOLDEN_P[[5, 6, 7, 3, 4, 2, 1, 0]]
GOLDEN_RATES = {Rule.REJECTION: 0.5, Rule.COUPLED: 0.4246443089}


@pytest.fixture(scope="module", autouse=True)
def one_thread_without_collector() -> Iterator[None]:
    """The collector would look through a hundred thousand samplings again and again; none of them is in a cycle."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class Language:
    """Target and drafter by the last token alone. p: (V + 1, V), the last row for "no token yet". q: V + 1 of them."""

    p: FloatArray
    q: list[Distribution]

    @classmethod
    def of(cls, p: FloatArray, q: FloatArray) -> Language:
        ids = np.arange(p.shape[1], dtype=np.int32)
        return cls(p, [Distribution(ids, row.astype(np.float32)) for row in q])

    @property
    def vocab_size(self) -> int:
        return self.p.shape[1]

    def law(self, num_tokens: int) -> FloatArray:
        """The probability of every sequence of so many tokens, in the order of its code."""
        found = []
        for tokens in itertools.product(range(self.vocab_size), repeat=num_tokens):
            pairs = itertools.pairwise((self.vocab_size, *tokens))
            found.append(float(np.prod([self.p[last, token] for last, token in pairs])))
        return np.array(found)


def golden() -> Language:
    return Language.of(np.tile(GOLDEN_P, (9, 1)), np.tile(GOLDEN_Q, (9, 1)))


def lopsided() -> Language:
    """What the drafter hardly ever says is what is recovered: here noise that both use would show most."""
    p, q = np.array([0.26, 0.28, 0.05, 0.15, 0.20, 0.06]), np.array([0.01, 0.05, 0.60, 0.01, 0.11, 0.22])
    return Language.of(np.tile(p, (7, 1)), np.tile(q, (7, 1)))


def mixed(vocab_size: int = 5) -> Language:
    rng = np.random.default_rng([53, 1])
    p, q = rng.gamma(0.7, size=(2, vocab_size + 1, vocab_size)) + 0.05
    return Language.of(p / p.sum(axis=-1, keepdims=True), q)


@dataclass(frozen=True, eq=False)
class Setting:
    """A rule, and how its drafts come about: `branching` children by depth, drawn or chosen.

    keyed_per_step: False leaves the step out of the drafts' noise keys.
    """

    rule: Rule
    branching: tuple[int, ...]
    drawn: bool
    keyed_per_step: bool = True
    _known: dict[tuple[Language, tuple[int, ...]], tuple[TokenTree, tuple[Distribution, ...]]] = field(
        default_factory=dict
    )

    def __str__(self) -> str:
        return f"{self.rule}-{'drawn' if self.drawn else 'chosen'}-{'x'.join(map(str, self.branching))}"

    @property
    def shape(self) -> list[tuple[int, int]]:
        """Per inner node, level by level: (node, how many children)."""
        shape, level, size = [], [0], 1
        for width in self.branching:
            shape += [(node, width) for node in level]
            level = list(range(size, size + width * len(level)))
            size += len(level)
        return shape

    def draft(self, language: Language, last: Tensor, key: tuple[Tensor, Tensor], places: Tensor) -> Tensor:
        """Return the tokens of root and nodes, (n, m + 1); last: (n,), places: (n, 1), where the first draft stands."""
        log_q = torch.from_numpy(np.log([q.probs for q in language.q]))
        ids = torch.arange(language.vocab_size)
        tokens, depths = [last], [0]
        for node, width in self.shape:
            scores = log_q[tokens[node]]
            if self.rule is Rule.COUPLED:
                scores = scores + gumbel(key, places + depths[node], ids)
            elif self.drawn:  # the largest, in order, are draws without replacement
                epochs = places if self.keyed_per_step else 0
                scores = scores + gumbel(key, places + depths[node], ids, Stream.DRAFT, epochs)
            tokens += scores.topk(width, dim=-1).indices.unbind(-1)
            depths += [depths[node] + 1] * width
        return torch.stack(tokens, dim=-1)

    def proposal(self, language: Language, tokens: tuple[int, ...]) -> tuple[TokenTree, tuple[Distribution, ...]]:
        """Return tree and q; seeds that drafted the same share them. tokens: root and nodes."""
        if (language, tokens) not in self._known:
            parents = [node for node, width in self.shape for _ in range(width)]
            q = tuple(language.q[tokens[parent]] for parent in parents) if self.drawn else ()
            tree = TokenTree(np.array(tokens[1:], np.int32), np.array(parents, np.int32))
            self._known[language, tokens] = tree, q
        return self._known[language, tokens]


def decide(asks: Sequence[Ask], log_p: Tensor) -> list[Walk]:
    """The served decision: by the target's picks, or by `walks`."""
    if asks[0].sampling.rule is not Rule.COUPLED:
        return walks(asks, log_p)
    places = [place for ask in asks for place in (ask.prefix_len + ask.tree.depths).tolist()]
    rules = [ask.sampling for ask in asks for _ in range(ask.tree.num_nodes + 1)]
    found, size = picks(log_p, places, rules), asks[0].tree.num_nodes + 1
    return [accept_coupled(ask.tree, found[size * i : size * (i + 1)]) for i, ask in enumerate(asks)]


def step(setting: Setting, language: Language, samplings: list[Sampling], texts: list[list[int]]) -> int:
    """Let every text grow by one step; return how many drafts were accepted at depth 1."""
    last = torch.tensor([text[-1] if text else language.vocab_size for text in texts])
    prefix_lens = [START + len(text) for text in texts]
    key = seed_words([sampling.seed for sampling in samplings], CPU)
    tokens = setting.draft(language, last, key, torch.tensor(prefix_lens)[:, None])
    drafts = [tuple(row) for row in tokens.tolist()]
    asks = [
        Ask(*setting.proposal(language, draft), prefix_len, sampling)
        for draft, prefix_len, sampling in zip(drafts, prefix_lens, samplings, strict=True)
    ]
    found = decide(asks, torch.from_numpy(np.log(language.p))[tokens.flatten()])
    for text, draft, walk in zip(texts, drafts, found, strict=True):
        text += [draft[node] for node in walk.path]
        text.append(walk.next_token)
    return sum(1 for walk in found if walk.path)


def emitted(setting: Setting, language: Language, num_tokens: int, num_seeds: int) -> tuple[np.ndarray, float]:
    """Return how often each sequence of so many first tokens came, by its code, and the first step's acceptance."""
    counts, accepted = np.zeros(language.vocab_size**num_tokens, np.int64), 0
    place = language.vocab_size ** np.arange(num_tokens)[::-1]
    for first in range(0, num_seeds, CHUNK):
        samplings = [
            Sampling(1.0, seed=seed, rule=setting.rule) for seed in range(first, min(first + CHUNK, num_seeds))
        ]
        texts: list[list[int]] = [[] for _ in samplings]
        accepted += step(setting, language, samplings, texts)
        while short := [i for i, text in enumerate(texts) if len(text) < num_tokens]:
            step(setting, language, [samplings[i] for i in short], [texts[i] for i in short])
        codes = np.array([text[:num_tokens] for text in texts]) @ place
        counts += np.bincount(codes, minlength=len(counts))
    return counts, accepted / num_seeds


@dataclass(frozen=True)
class Distance:
    """How far counts are from a law. variation: total variation. floor: its expected value under the law."""

    variation: float
    floor: float
    p_value: float

    @classmethod
    def between(cls, counts: np.ndarray, law: FloatArray) -> Distance:
        total = counts.sum()
        floor = 0.5 * np.sqrt(2 * law * (1 - law) / (np.pi * total)).sum()
        p_value = stats.chisquare(counts, total * law / law.sum()).pvalue
        return cls(0.5 * np.abs(counts / total - law).sum(), float(floor), float(p_value))

    @property
    def is_chance(self) -> bool:
        return self.variation < 3 * self.floor and self.p_value > 1e-4

    @property
    def is_bias(self) -> bool:
        """Beyond what any seed would excuse."""
        return self.variation > 3 * self.floor and self.p_value < 1e-12


COUPLED = Setting(Rule.COUPLED, (1, 1), drawn=False)
CHAIN = Setting(Rule.REJECTION, (1, 1), drawn=True)
SIBLINGS = Setting(Rule.REJECTION, (3, 1), drawn=True)
CHOSEN = Setting(Rule.REJECTION, (3, 1), drawn=False)
BLOCK = Setting(Rule.BLOCK, (1, 1), drawn=True)
CHOSEN_BLOCK = Setting(Rule.BLOCK, (1, 1), drawn=False)
BLOCK_KEYED_BY_POSITION = Setting(Rule.BLOCK, (1, 1), drawn=True, keyed_per_step=False)
SETTINGS = [COUPLED, CHAIN, SIBLINGS, CHOSEN, BLOCK, CHOSEN_BLOCK]


# The laws


@pytest.mark.parametrize("setting", [COUPLED, CHAIN, SIBLINGS, CHOSEN, BLOCK], ids=str)
def test_the_first_token_has_the_target_s_law_on_the_golden_pair(setting: Setting) -> None:
    single = Setting(setting.rule, setting.branching[:1], setting.drawn)
    counts, acceptance = emitted(single, golden(), 1, NUM_FIRST)
    found = Distance.between(counts, golden().law(1))
    assert found.is_chance, found
    if setting in (COUPLED, CHAIN, BLOCK):
        rate = GOLDEN_RATES.get(setting.rule, 0.5)  # of one token, block verification is rejection
        assert abs(acceptance - rate) < 4 * np.sqrt(rate * (1 - rate) / NUM_FIRST)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_three_tokens_of_several_steps_have_the_target_s_joint_law(setting: Setting) -> None:
    language = mixed()
    counts, _ = emitted(setting, language, 3, NUM_JOINT)
    found = Distance.between(counts, language.law(3))
    assert found.is_chance, found
    first = Distance.between(counts.reshape(5, 25).sum(axis=1), language.law(1))
    assert first.is_chance, first


def test_picks_at_two_positions_are_independent_and_have_the_law() -> None:
    log_p = torch.from_numpy(np.log(GOLDEN_P)).expand(2 * CHUNK, -1)
    counts = np.zeros((8, 8), np.int64)
    for first in range(0, NUM_FIRST // 2, CHUNK):
        rules = [Sampling(1.0, seed=seed) for seed in range(first, first + CHUNK)]
        found = np.array(picks(log_p, [START] * CHUNK + [START + 1] * CHUNK, rules * 2)).reshape(2, CHUNK)
        np.add.at(counts, tuple(found), 1)
    assert stats.chi2_contingency(counts).pvalue > 1e-4
    for own in (counts.sum(axis=0), counts.sum(axis=1)):
        assert Distance.between(own, GOLDEN_P).is_chance


# Planted bugs: each has been another server's, and must show


def recovery_from_the_drafts_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "gumbel", lambda *key: gumbel(*key[:3], Stream.DRAFT, key[4]))


def recovery_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "_less", lambda rows, ids, probs: rows)


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
    replace_rule(monkeypatch, "_chosen", lambda left, nodes, asks: left[nodes.parents, nodes.tokens])


def token_chances_in_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(left: Tensor, nodes: Any, asks: Sequence[Ask]) -> Tensor:
        chances = accept._drawn(left.clone(), nodes, asks)
        accept._block(left, nodes, asks)
        return chances

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
        (sibling_not_removed, CHOSEN, mixed),
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
    bug(monkeypatch)
    num_tokens = 2 if made is lopsided else 3  # the fewest in which the bug is plain
    counts, _ = emitted(setting, made(), num_tokens, NUM_PLANTED)
    found = Distance.between(counts, made().law(num_tokens))
    assert found.is_bias, found
