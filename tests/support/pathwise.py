"""Texts of table models, grown by the served decision over trees of every kind, and held against the reference.

The reference's token behind a prefix is `pick` of that prefix's row. So a text is the reference's own, token by token,
exactly when every one of its tokens is the pick behind those before it: all of them are asked for in one call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from orchestrator.core.context import Context
from orchestrator.core.noise import gumbel
from orchestrator.core.proposal import Budget, Proposer
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Acceptance, FloatArray
from orchestrator.proposers.prompt_lookup import PromptLookup, PromptLookupConfig
from orchestrator.sampling.accept import AcceptedPath, accept_coupled
from orchestrator.sampling.distribution import sample
from orchestrator.sampling.reference import generate
from runtime.engine.verify import VerifyInput, VerifyResult, verify
from runtime.sampling.accept import AcceptInput
from tests.support.decode import dependencies
from tests.support.table_target import TableTarget

ORDER, LENGTH, NUM_AT_ONCE, MOST_DRAFTED = 2, 64, 512, 8
VOCABULARIES = (8, 2, 3, 5, 13, 32)
SAMPLINGS = (
    Sampling(1.0),
    Sampling(0.0),
    Sampling(0.6),
    Sampling(1.7),
    Sampling(1.0, top_k=3),
    Sampling(0.8, top_p=0.9),
    Sampling(1.2, min_p=0.1),
    Sampling(1.0, typical_p=0.8),
)


@dataclass(frozen=True, eq=False)
class Table:
    """A table target and its drafter, by the code of the last tokens. target, drafter: (codes, V) logits."""

    source: TableTarget
    target: FloatArray
    drafter: FloatArray

    @classmethod
    def of(cls, vocab_size: int, table_seed: int) -> Table:
        """Return the table of a target, beside a drafter that is like it."""
        source = TableTarget(vocab_size, ORDER, table_seed, sharpness=1.0)
        codes = [(a, b) for a in range(-1, vocab_size) for b in range(-1, vocab_size)]
        target = np.stack([source.logits([token for token in code if token >= 0]) for code in codes])
        return cls(source, target, target + np.random.default_rng([61, table_seed]).normal(size=target.shape))

    def code(self, ids: Sequence[int]) -> int:
        """Return the code behind these ids, two or more."""
        return (ids[-2] + 1) * (self.source.vocab_size + 1) + ids[-1] + 1

    def after(self, code: int, token: int) -> int:
        """Return the code once this token has been said."""
        return (code * (self.source.vocab_size + 1) + token + 1) % len(self.target)


@dataclass(eq=False)
class Text:
    """One text on its way. steps: per step the codes of root and nodes, where it stood, its tree and its walk."""

    table: Table
    sampling: Sampling
    context: Context
    steps: list[tuple[list[int], int, TokenTree, AcceptedPath]] = field(default_factory=list)

    @cached_property
    def proposer(self) -> Proposer:
        """One that is served."""
        return PromptLookup(PromptLookupConfig(max_ngram=2, draft_len=MOST_DRAFTED, branches=2), dependencies())

    @cached_property
    def noise(self) -> FloatArray:
        """The target's own noise, (places, V), as a drafter under `coupled` uses it."""
        places = np.arange(self.context.prompt_len + LENGTH + MOST_DRAFTED + 1)
        return gumbel(self.sampling.seed, places[:, None], np.arange(self.table.source.vocab_size))

    @property
    def is_short(self) -> bool:
        """True while there is not all that is looked at."""
        return len(self.context) < self.context.prompt_len + LENGTH

    @property
    def output(self) -> list[int]:
        """What was said, as much as is looked at."""
        return self.context.output[:LENGTH]

    def codes_of(self, tree: TokenTree) -> list[int]:
        """Return the code behind root and every node."""
        codes = [self.table.code(self.context.ids)]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            codes.append(self.table.after(codes[parent], token))
        return codes

    def grow(self, codes: list[int], tree: TokenTree, walk: AcceptedPath) -> None:
        """Commit what a step has decided."""
        self.steps.append((codes, len(self.context), tree, walk))
        self.context.commit(Acceptance(*walk).tokens(tree))


# Trees of every kind


def nothing(text: Text, rng: random.Random) -> TokenTree:
    """No draft at all."""
    return TokenTree.bare()


def anything(text: Text, rng: random.Random) -> TokenTree:
    """Any tokens below any parents; twins are left out."""
    edges: dict[tuple[int, int], None] = {}
    for _ in range(rng.randint(1, MOST_DRAFTED)):
        edges.setdefault((rng.randint(0, len(edges)), rng.randrange(text.table.source.vocab_size)))
    return tree_of([token for _, token in edges], [parent for parent, _ in edges])


def chain(text: Text, rng: random.Random) -> TokenTree:
    """What the drafter picks with the target's noise; now and then what the target itself would, untruncated."""
    logits = text.table.drafter if rng.random() < 0.7 else text.table.target
    code, tokens = text.table.code(text.context.ids), list[int]()
    for noise in text.noise[len(text.context) :][: rng.randint(1, MOST_DRAFTED)]:
        tokens.append(int((logits[code] + noise).argmax()))
        code = text.table.after(code, tokens[-1])
    return TokenTree.chain(tokens)


def branches(text: Text, rng: random.Random) -> TokenTree:
    """The drafter's two best below the root and both of its children, in any order."""
    tokens, parents, codes = list[int](), list[int](), [text.table.code(text.context.ids)]
    for parent in range(3):
        noise = text.noise[len(text.context) + (parent > 0)]
        best = np.argsort(-(text.table.drafter[codes[parent]] + noise))[:2].tolist()
        for token in best if rng.random() < 0.5 else best[::-1]:
            tokens.append(token)
            parents.append(parent)
            codes.append(text.table.after(codes[parent], token))
    return tree_of(tokens, parents)


def served(text: Text, rng: random.Random) -> TokenTree:
    """What a served proposer drafts."""
    return text.proposer.propose(text.context, text.sampling, Budget(2 * MOST_DRAFTED, MOST_DRAFTED)).tree


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    """Return the tree of these nodes."""
    return TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32))


KINDS: tuple[Callable[[Text, random.Random], TokenTree], ...] = (nothing, anything, chain, chain, branches, served)


# Steps


def texts(tables: Sequence[Table], first_seed: int, rng: random.Random) -> list[Text]:
    """Return NUM_AT_ONCE texts, none of them begun, each with its own seed, prompt and sampling."""
    made = []
    for number in range(NUM_AT_ONCE):
        table = rng.choice(tables)
        seed = (first_seed + number) * 0x9E3779B97F4A7C15 % 2**64  # both words of the key are at work
        prompt = [rng.randrange(table.source.vocab_size) for _ in range(rng.randint(ORDER, 9))]
        made.append(Text(table, replace(rng.choice(SAMPLINGS), seed=seed), Context(prompt)))
    return made


def step(growing: Sequence[Text], rng: random.Random) -> None:
    """Let every text grow by one served decision; they share one batch, and one vocabulary."""
    trees = [rng.choice(KINDS)(text, rng) for text in growing]
    codes = [text.codes_of(tree) for text, tree in zip(growing, trees, strict=True)]
    inputs = [
        VerifyInput(AcceptInput(tree, (), len(text.context), text.sampling), text.context, None, False)
        for text, tree in zip(growing, trees, strict=True)
    ]
    logits = [torch.from_numpy(text.table.target[own]) for text, own in zip(growing, codes, strict=True)]
    for text, own, tree, result in zip(growing, codes, trees, verify(inputs, logits), strict=True):
        if not isinstance(result, VerifyResult):
            raise result
        text.grow(own, tree, result.accepted)


@dataclass
class Found:
    """What was compared. accepted: draft tokens. wrong_tokens: beside the reference. wrong_walks: beside its walk."""

    texts: int = 0
    tokens: int = 0
    steps: int = 0
    nodes: int = 0
    accepted: int = 0
    wrong_tokens: int = 0
    wrong_walks: int = 0

    def observe(self, text: Text) -> None:
        """Hold one text against the reference."""
        self.texts += 1
        self.tokens += len(text.output)
        self.steps += len(text.steps)
        self.nodes += sum(tree.num_nodes for _, _, tree, _ in text.steps)
        self.accepted += sum(len(walk.path) for *_, walk in text.steps)
        self.wrong_tokens += num_wrong(text)
        self.wrong_walks += sum(walk != truth for (*_, walk), truth in zip(text.steps, walks(text), strict=True))


def num_wrong(text: Text) -> int:
    """Return how many tokens of the output are not the reference's pick behind those before them."""
    places = np.arange(text.context.prompt_len, text.context.prompt_len + len(text.output))
    codes = [text.table.code(text.context.ids[place - ORDER : place]) for place in places.tolist()]
    return int((sample(text.table.target[codes], places, text.sampling) != text.output).sum())


def walks(text: Text) -> Iterator[AcceptedPath]:
    """Yield what the numpy reference decides at every step, all their picks from one call."""
    codes = [code for own, *_ in text.steps for code in own]
    places = np.concatenate([prefix_len + tree.depths for _, prefix_len, tree, _ in text.steps])
    target_tokens = iter(sample(text.table.target[codes], places, text.sampling).tolist())
    for own, _, tree, _ in text.steps:
        yield accept_coupled(tree, [next(target_tokens) for _ in own])


def num_wrong_alone(text: Text) -> int:
    """Return how many tokens the reference says otherwise when it says the text itself, from the target's own rows."""
    prompt = text.context.ids[: text.context.prompt_len]
    alone = generate(text.table.source.logits, prompt, text.sampling, LENGTH)
    return sum(ours != its for ours, its in zip(text.output, alone, strict=True))


def compare(num_tokens: int, every: int = 200) -> Found:
    """Return what was found in at least so many tokens; one text in `every` is also said by the reference itself."""
    rng, found = random.Random(67), Found()
    tables = [[Table.of(size, seed) for seed in range(4)] for size in VOCABULARIES]
    while found.tokens < num_tokens:
        batch = texts(tables[found.texts // NUM_AT_ONCE % len(tables)], found.texts, rng)
        while growing := [text for text in batch if text.is_short]:
            step(growing, rng)
        for number, text in enumerate(batch):
            found.observe(text)
            found.wrong_tokens += num_wrong_alone(text) if number % every == 0 else 0
    return found
