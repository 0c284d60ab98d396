"""The distributions that the served rules emit, over the seeds 0, 1, 2 …: nothing is random.

Two measures: total variation beside its floor (its expected value for a correct sampler at this number of
samples), and the p-value of a chi-square test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

from orchestrator.core.arrays import FloatArray
from orchestrator.core.noise import Stream
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution
from runtime.engine.sampling.accept import AcceptInput
from runtime.engine.sampling.noise import gumbel, seed_words
from runtime.engine.sampling.served import decide
from runtime.models.heads.modules.redrafter import RedrafterHead
from runtime.models.native.draft_calls import NativeDraft
from runtime.models.native.heads import NativeHead

CHUNK = 25_000
START = 7  # tokens before the first one sampled
CPU = torch.device("cpu")
HEAD_WIDTH = 16

#: The pair whose rates are known: rejection accepts 1 − TV, coupled noise Σ 1 / Σ max(pⱼ/pᵢ, qⱼ/qᵢ).
GOLDEN_P = np.array([0.30, 0.20, 0.15, 0.10, 0.10, 0.05, 0.05, 0.05])
GOLDEN_Q = GOLDEN_P[[5, 6, 7, 3, 4, 2, 1, 0]]
GOLDEN_RATES = {Rule.REJECTION: 0.5, Rule.COUPLED: 0.4246443089}


@dataclass(frozen=True, eq=False)
class Language:
    """A target and a drafter that depend only on the last token. p, q: (V + 1, V), the last row for "no token yet"."""

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
        """Return the probability of every sequence of num_tokens tokens, in the order of their codes."""
        found = []
        for tokens in itertools.product(range(self.vocab_size), repeat=num_tokens):
            pairs = itertools.pairwise((self.vocab_size, *tokens))
            found.append(float(np.prod([self.p[last, token] for last, token in pairs])))
        return np.array(found)


def golden() -> Language:
    return Language.of(np.tile(GOLDEN_P, (9, 1)), np.tile(GOLDEN_Q, (9, 1)))


def lopsided() -> Language:
    """Return a pair whose recovered tokens are rarely drafted; shared noise would show most here."""
    p, q = np.array([0.26, 0.28, 0.05, 0.15, 0.20, 0.06]), np.array([0.01, 0.05, 0.60, 0.01, 0.11, 0.22])
    return Language.of(np.tile(p, (7, 1)), np.tile(q, (7, 1)))


def mixed(vocab_size: int = 5) -> Language:
    rng = np.random.default_rng([53, 1])
    p, q = rng.gamma(0.7, size=(2, vocab_size + 1, vocab_size)) + 0.05
    return Language.of(p / p.sum(axis=-1, keepdims=True), q)


@dataclass(frozen=True, eq=False)
class Setting:
    """A rule, and how drafts are made: `branching` children by depth, sampled or deterministic.

    keyed_per_step: False leaves the step out of the drafts' noise keys.
    """

    rule: Rule
    branching: tuple[int, ...]
    sampled: bool
    keyed_per_step: bool = True
    _known: dict[tuple[Language, tuple[int, ...]], tuple[TokenTree, tuple[Distribution, ...]]] = field(
        default_factory=dict
    )

    def __str__(self) -> str:
        return f"{self.rule}-{'sampled' if self.sampled else 'deterministic'}-{'x'.join(map(str, self.branching))}"

    @property
    def single(self) -> Setting:
        """The same with drafts of one level."""
        return Setting(self.rule, self.branching[:1], self.sampled)

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
        """Return the tokens of root and nodes, (n, m + 1). last: (n,). places: (n, 1), position of the first draft."""
        log_q = torch.from_numpy(np.log([q.probs for q in language.q]))
        ids = torch.arange(language.vocab_size)
        tokens, depths = [last], [0]
        for node, width in self.shape:
            scores = log_q[tokens[node]]
            if self.rule is Rule.COUPLED:
                scores = scores + gumbel(key, places + depths[node], ids)
            elif self.sampled:  # the largest, in order, are samples without replacement
                epochs = places if self.keyed_per_step else 0
                scores = scores + gumbel(key, places + depths[node], ids, Stream.DRAFT, epochs)
            tokens += scores.topk(width, dim=-1).indices.unbind(-1)
            depths += [depths[node] + 1] * width
        return torch.stack(tokens, dim=-1)

    def inputs(
        self, language: Language, samplings: list[Sampling], texts: list[list[int]]
    ) -> tuple[list[AcceptInput], Sequence[Tensor]]:
        """Return each text's next draft, and log p at its root and nodes, (m + 1, V)."""
        last = torch.tensor([text[-1] if text else language.vocab_size for text in texts])
        prefix_lens = [START + len(text) for text in texts]
        key = seed_words([sampling.seed for sampling in samplings], CPU)
        tokens = self.draft(language, last, key, torch.tensor(prefix_lens)[:, None])
        proposals = [self.proposal(language, tuple(row)) for row in tokens.tolist()]
        made = [
            AcceptInput(*proposal, prefix_len, sampling)
            for proposal, prefix_len, sampling in zip(proposals, prefix_lens, samplings, strict=True)
        ]
        return made, list(torch.from_numpy(np.log(language.p))[tokens])

    def proposal(self, language: Language, tokens: tuple[int, ...]) -> tuple[TokenTree, tuple[Distribution, ...]]:
        """Return tree and q, which seeds with the same drafts share. tokens: of root and nodes."""
        if (language, tokens) not in self._known:
            parents = [node for node, width in self.shape for _ in range(width)]
            q = tuple(language.q[tokens[parent]] for parent in parents) if self.sampled else ()
            tree = TokenTree(np.array(tokens[1:], np.int32), np.array(parents, np.int32))
            self._known[language, tokens] = tree, q
        return self._known[language, tokens]


@dataclass(frozen=True, eq=False)
class Grown(Setting):
    """Trees that a recurrent head in native code samples while they grow, of 3 levels and at most `max_nodes` nodes.

    Its q depends on the whole path; the language's own q is not used.
    """

    rule: Rule = Rule.REJECTION
    branching: tuple[int, ...] = ()
    sampled: bool = True
    width: int = 2
    max_nodes: int = 4

    def __str__(self) -> str:
        return f"{self.rule}-grown-{self.max_nodes}"

    @property
    def single(self) -> Setting:
        return self

    def inputs(
        self, language: Language, samplings: list[Sampling], texts: list[list[int]]
    ) -> tuple[list[AcceptInput], Sequence[Tensor]]:
        state, vocab_size = np.full((1, HEAD_WIDTH), 0.3, np.float32), language.vocab_size
        drafts = [
            NativeDraft(
                sampling, START + len(text), self.max_nodes, 3, self.width, TokenTree.bare(), [text[-1] if text else 0],
                state, math.inf, min_score=math.log(0.02), draws=True, sharpness=0.6,
            )
            for sampling, text in zip(samplings, texts, strict=True)
        ]  # fmt: skip
        head = small_head(vocab_size)
        answers = [answer for first in range(0, len(drafts), 500) for answer in head.draft(drafts[first : first + 500])]
        made = [
            AcceptInput(answer.tree, answer.q, draft.position, draft.sampling)
            for answer, draft in zip(answers, drafts, strict=True)
        ]
        log_p = torch.from_numpy(np.log(language.p))
        rows = [
            log_p[[text[-1] if text else vocab_size, *each.tree.tokens.tolist()]]
            for each, text in zip(made, texts, strict=True)
        ]
        return made, rows


@cache
def small_head(vocab_size: int) -> NativeHead:
    """Return a recurrent head with random weights."""
    generator = torch.Generator().manual_seed(4)
    head = RedrafterHead(torch.randn(vocab_size, HEAD_WIDTH, generator=generator), 0, 2 * HEAD_WIDTH, rnn=False)
    head.lm_head[0].weight.data = 0.25 * torch.randn(vocab_size, 2 * HEAD_WIDTH, generator=generator)
    return NativeHead(head.eval().requires_grad_(False))


def step(setting: Setting, language: Language, samplings: list[Sampling], texts: list[list[int]]) -> int:
    """Extend every text by one step; return how many drafts were accepted at depth 1."""
    inputs, log_p = setting.inputs(language, samplings, texts)
    found = decide(inputs, log_p, [False] * len(inputs))
    for text, each, accepted in zip(texts, inputs, found, strict=True):
        text += [*each.tree.tokens[np.array(accepted.path, int) - 1].tolist(), accepted.next_token]
    return sum(1 for accepted in found if accepted.path)


def emitted(
    setting: Setting, language: Language, num_tokens: int, num_seeds: int
) -> tuple[npt.NDArray[np.int64], float]:
    """Return how often each sequence of first tokens was emitted, by code, and the first step's acceptance rate."""
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
    """How far counts are from a distribution. variation: total variation. floor: its expected value by chance."""

    variation: float
    floor: float
    p_value: float

    @classmethod
    def between(cls, counts: npt.NDArray[np.int64], law: FloatArray) -> Distance:
        total = counts.sum()
        floor = 0.5 * np.sqrt(2 * law * (1 - law) / (np.pi * total)).sum()
        p_value = stats.chisquare(counts, total * law / law.sum()).pvalue
        return cls(0.5 * np.abs(counts / total - law).sum(), float(floor), float(p_value))

    @property
    def is_chance(self) -> bool:
        return self.variation < 3 * self.floor and self.p_value > 1e-4

    @property
    def is_bias(self) -> bool:
        """True if chance cannot explain the distance."""
        return self.variation > 3 * self.floor and self.p_value < 1e-12


COUPLED = Setting(Rule.COUPLED, (1, 1), sampled=False)
CHAIN = Setting(Rule.REJECTION, (1, 1), sampled=True)
SIBLINGS = Setting(Rule.REJECTION, (3, 1), sampled=True)
DETERMINISTIC = Setting(Rule.REJECTION, (3, 1), sampled=False)
BLOCK = Setting(Rule.BLOCK, (1, 1), sampled=True)
DETERMINISTIC_BLOCK = Setting(Rule.BLOCK, (1, 1), sampled=False)
BLOCK_KEYED_BY_POSITION = Setting(Rule.BLOCK, (1, 1), sampled=True, keyed_per_step=False)
GROWN = Grown()
SETTINGS = [COUPLED, CHAIN, SIBLINGS, GROWN, DETERMINISTIC, BLOCK, DETERMINISTIC_BLOCK]
