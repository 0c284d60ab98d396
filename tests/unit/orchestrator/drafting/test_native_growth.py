"""The native growth: the trees of the reference, bit for bit, over texts, statistics and predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from build.corpus_index import shards_of, sorted_ends
from orchestrator.core.context import Context
from orchestrator.core.proposal import Budget
from orchestrator.drafting.candidates import likeliest_followers
from orchestrator.drafting.corpus import Corpus, Shard
from orchestrator.drafting.dependencies import ProposerDependencies
from orchestrator.drafting.estimates import AcceptanceEstimates
from orchestrator.drafting.growth import Growth
from orchestrator.drafting.memory import Memory, new_memory
from orchestrator.drafting.native_growth import NativeGrowth, growth_of, sources_of
from orchestrator.drafting.tables import Level, Tables, VocabularyFingerprint, packed
from tests.support.cost_models import cost_model_of
from tests.support.decode import dependencies

VOCAB = 12
NUM_CASES = 16


def text_of(rng: np.random.Generator, length: int) -> list[int]:
    """A text of few tokens that repeats pieces of itself."""
    text = rng.integers(0, VOCAB, 20).tolist()
    while len(text) < length:
        start = int(rng.integers(0, len(text) - 8))
        text += (
            text[start : start + int(rng.integers(1, 30))] + rng.integers(0, VOCAB, int(rng.integers(0, 3))).tolist()
        )
    return text[:length]


def tables_of(rng: np.random.Generator) -> Tables:
    """Counts after all contexts of no token and some of one, two and three, ties among them."""
    levels = []
    for length in range(4):
        keys = np.unique(rng.integers(0, VOCAB**length, 40))
        sizes = rng.integers(1, 5, len(keys))
        ids = np.concatenate([np.sort(rng.choice(VOCAB, size, replace=False)) for size in sizes])
        levels.append(Level(keys, np.concatenate([[0], np.cumsum(sizes)]), ids, rng.integers(1, 4, len(ids))))
    return Tables(VocabularyFingerprint(VOCAB, ""), tuple(levels))


def corpus_of(rng: np.random.Generator, text: list[int]) -> Corpus:
    """Several shards of short documents, pieces of the text among them; some places have many different followers."""
    pieces = [text[start : start + 20] for start in range(0, len(text), 7)]
    documents = [*pieces, *(text_of(rng, int(rng.integers(1, 60))) for _ in range(30))]
    return Corpus([Shard(ids, sorted_ends(ids, VOCAB)) for ids in shards_of(iter(documents), VOCAB, 500)], VOCAB)


def cases() -> Iterator[ProposerDependencies]:
    for seed in range(NUM_CASES):
        rng = np.random.default_rng(seed)
        text = text_of(rng, 60)
        yield replace(
            dependencies(),
            vocab_size=VOCAB,
            tables=tables_of(rng) if seed % 2 else None,
            corpus=corpus_of(rng, text_of(rng, 200)) if seed % 4 >= 2 else None,
            prediction=tuple(text) if seed % 3 else (),
            estimates=AcceptanceEstimates(),
        )


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("number", range(NUM_CASES))
def test_native_trees_are_those_of_the_reference(number: int, is_chain: bool) -> None:
    given = [*cases()][number]
    assert given.estimates.native
    native_memory, memory = new_memory(500), Memory(500)
    remembers = number % 5 > 1
    rng = np.random.default_rng(100 + number)
    costs = cost_model_of(1.0 + np.cumsum(rng.random(129)) * 0.05, others_tokens=float(number % 3))
    num_nodes, sources = 0, set[str]()
    for temperature_range in (0, 3, 0):  # requests of one deployment
        ids = [*given.prediction[:30], *text_of(rng, 200)]
        if remembers:
            given = replace(given, memory=native_memory.of("a"))
        native = NativeGrowth(given.estimates.native, given, is_chain)
        if remembers:
            given = replace(given, memory=memory.of("a"))
        reference = Growth([*sources_of(given)], given.estimates, is_chain)
        context = Context(ids[:10])
        context.commit(ids[10 : 10 + int(rng.integers(0, 30))])  # output that another replica generated
        if rng.random() < 0.5:
            native.begin(context)
        while len(context) < len(ids):
            budget = Budget(int(rng.integers(0, 40)), int(rng.integers(0, 12)))
            found, expected = (each.grow(context, budget, costs, temperature_range) for each in (native, reference))
            assert found.tree.tokens.tolist() == expected.tree.tokens.tolist()
            assert found.tree.parents.tolist() == expected.tree.parents.tolist()
            assert found.sources == expected.sources
            assert native.probabilities.tolist() == pytest.approx(reference.probabilities.tolist())
            num_nodes += found.tree.num_nodes
            sources.update(*(names.split("+") for names in found.sources))
            response = [*context.ids[-20:], *text_of(rng, 25)] if rng.random() < 0.2 else []
            for each_memory in (native_memory, memory):
                each_memory.learn("a", response)
            came = ids[len(context) : len(context) + int(rng.integers(1, 6))]
            for each in (native, reference):
                each.learn(came)
            context.commit(came)
            context.commit(ids[len(context) : len(context) + int(rng.integers(0, 4))])  # plain steps
    assert num_nodes > 100
    assert ("corpus" in sources) == bool(given.corpus)
    assert ("memory" in sources) == remembers


def test_a_long_prompt_and_a_long_prediction_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call keeps Python's global lock: 131,072 tokens would stop all requests for 0.3 s."""
    most = 7
    monkeypatch.setattr("native.drafts.PIECE", most)
    given, rng = [*cases()][5], np.random.default_rng(7)
    assert given.estimates.native and len(given.prediction) > most
    costs, ids, num_nodes = cost_model_of(1.0 + np.arange(129) * 0.01), text_of(rng, 200), 0
    lengths = list[int]()
    monkeypatch.setattr(given.estimates.native, "library", spied(given.estimates.native.library, lengths))
    native = NativeGrowth(given.estimates.native, given, is_chain=False)
    reference = Growth([*sources_of(given)], given.estimates)
    assert max(lengths) == most and sum(lengths) == len(given.prediction)
    native.begin(Context(ids[:100]))
    for length in (100, 103, 104, 109):
        context = Context(ids[:length])
        found, expected = (each.grow(context, Budget(40, 12), costs) for each in (native, reference))
        assert found.tree.tokens.tolist() == expected.tree.tokens.tolist()
        assert native.probabilities.tolist() == pytest.approx(reference.probabilities.tolist())
        num_nodes += found.tree.num_nodes
    assert num_nodes > 10 and max(lengths) == most and sum(lengths) == len(given.prediction) + 109


@pytest.mark.parametrize(("near", "far", "token"), [(5, 6, 41), (6, 7, 40)])
def test_at_most_six_tokens_decide_where_a_prediction_is_followed_again(near: int, far: int, token: int) -> None:
    """near, far: tokens before 40, early in the prediction, and before 41, late in it, that agree with the text."""
    text = [*range(20, 27)]
    prediction = (50, *text[-near:], 40, *range(30, 39), 51, *text[-far:], 41)
    given = replace(dependencies(), prediction=prediction, estimates=AcceptanceEstimates())
    assert given.estimates.native
    context, costs = Context([1]), cost_model_of(np.ones(129))
    context.commit(text)
    for growth in (
        NativeGrowth(given.estimates.native, given, is_chain=False),
        Growth([*sources_of(given)], given.estimates),
    ):
        assert growth.grow(context, Budget(1, 1), costs).tree.tokens.tolist() == [token]


def spied(library: Any, lengths: list[int]) -> Any:
    """Return the library; each of its calls that reads tokens adds to the list how many."""

    class Spy:
        def __getattr__(self, name: str) -> Any:
            function = getattr(library, name)

            def call(handle: int, tokens: Any, count: int) -> Any:
                lengths.append(count)
                return function(handle, tokens, count)

            return call if "read" in name else function

    return Spy()


def test_likeliest_followers_are_the_first_of_the_most_frequent() -> None:
    tables = tables_of(np.random.default_rng(5))
    for length, level in enumerate(likeliest_followers(tables), start=1):
        for key, token in zip(level.keys.tolist(), level.tokens.tolist(), strict=True):
            context = [key // VOCAB ** (length - 1 - place) % VOCAB for place in range(length)]
            assert packed(context, VOCAB) == key
            followers = tables.followers(context)
            assert followers
            assert token == followers.ids[followers.weights.argmax()]


def test_without_a_compiler_the_reference_serves() -> None:
    given = replace(dependencies(), estimates=AcceptanceEstimates())
    given.estimates.native = None
    assert isinstance(growth_of(given, is_chain=False), Growth)
