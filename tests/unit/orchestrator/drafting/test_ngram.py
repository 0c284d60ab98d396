"""The n-gram drafter: true q, backed off, coupled to the target; its tables; and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from auditor.reference import decoding as reference
from auditor.reference.distribution import log_p, sample
from native.draws import sample_draft
from native.response_memory import NativeMemory
from orchestrator.core.arrays import FloatArray
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import RequestError
from orchestrator.core.proposal import Budget, Proposal
from orchestrator.core.sampled_drafts import MAX_CANDIDATES
from orchestrator.core.sampling_params import Sampling
from orchestrator.drafting.ngram import Ngram, NgramConfig, q_of
from orchestrator.drafting.tables import Followers, Tables
from orchestrator.server.statistics import Statistics
from tests.support.counted import tables_of
from tests.support.decode import decode, dependencies
from tests.support.table_target import TableTarget

VOCAB_SIZE = 8
WIDE = Budget(128, 1000)
GREEDY = Sampling()


def law_of(target: TableTarget) -> Tables:
    """Tables whose q is the target's p: the law of every context of two tokens (and a wrong one of fewer)."""
    counted: dict[tuple[int, ...], dict[int, float]] = {(): {0: 1.0}}
    for first in range(target.vocab_size):
        counted[(first,)] = {0: 1.0}
        for second in range(target.vocab_size):
            counted[(first, second)] = dict(enumerate(np.exp(target.logits([first, second])).tolist()))
    return tables_of(counted, target.vocab_size)


COUNTED = {
    (): {0: 5, 3: 9, 7: 9},
    (1,): {2: 4, 3: 1},
    (2,): {1: 3, 5: 3},
    (1, 2): {6: 2},
    (6,): {1: 1},
    (3, 1, 2): {4: 1},
}


def proposed(ids: list[int], sampling: Sampling = GREEDY, budget: Budget = WIDE, **keys: int) -> Proposal:
    proposal = Ngram(NgramConfig(**keys), dependencies(tables=tables_of(COUNTED, VOCAB_SIZE))).propose(
        Context(ids), sampling, budget
    )
    assert proposal.tree.is_chain and set(proposal.sources) <= {"ngram"}
    assert len(proposal.q) == len(proposal.sources) == proposal.tree.num_nodes
    return proposal


@pytest.mark.parametrize(
    ("ids", "order", "expected"),
    [
        ([1], 1, [3, 3, 3]),  # the unigram; 3 and 7 tie: the lowest id
        ([1], 2, [2, 1, 2]),  # 1 and 5 tie after 2
        ([0, 1, 2], 3, [6, 1, 2]),  # 1 2 → 6; 2 6 unknown, 6 → 1; 6 1 unknown, 1 → 2
        ([3, 1, 2], 4, [4, 3, 3]),  # 3 1 2 → 4; nothing known after 4
        ([0, 1, 2], 4, [6, 1, 2]),
        ([2], 4, [1, 2, 6]),  # a context shorter than order − 1
        ([9], 4, [3, 3, 3]),
    ],
)
def test_ngram_chain_by_hand_backs_off_to_the_longest_known_context(
    ids: list[int], order: int, expected: list[int]
) -> None:
    assert proposed(ids, order=order, draft_len=3).tree.tokens.tolist() == expected


def test_ngram_budget_cuts_the_chain() -> None:
    for budget, length in ((Budget(2, 9), 2), (Budget(9, 1), 1), (Budget(0, 9), 0), (Budget(9, 9), 3)):
        assert proposed([1], budget=budget, draft_len=3).tree.num_nodes == length


def test_ngram_context_is_not_changed_by_drafting() -> None:
    context = Context([1])
    Ngram(NgramConfig(draft_len=3), dependencies(tables=tables_of(COUNTED, VOCAB_SIZE))).propose(context, GREEDY, WIDE)
    assert context.ids == [1]


def test_ngram_memory_adds_its_counts_but_no_unigram() -> None:
    memory = NativeMemory(1000)
    alone = Ngram(NgramConfig(draft_len=1), dependencies(memory=memory.of("")))
    both = Ngram(NgramConfig(draft_len=1), dependencies(tables=tables_of(COUNTED, VOCAB_SIZE), memory=memory.of("")))
    assert alone.propose(Context([1]), GREEDY, WIDE).tree.num_nodes == 0
    memory.learn("", [1, 3] * 5 + [5, 5])
    assert alone.propose(Context([1]), GREEDY, WIDE).tree.tokens.tolist() == [3]
    assert alone.propose(Context([4]), GREEDY, WIDE).tree.num_nodes == 0
    proposal = both.propose(Context([4, 1]), replace(GREEDY, temperature=1.0), WIDE)
    assert proposal.q[0].ids.tolist() == [2, 3]
    np.testing.assert_allclose(proposal.q[0].probs, [4 / 10, 6 / 10])  # 4 : 0 and 1 : 5
    other = Ngram(
        NgramConfig(draft_len=1), dependencies(tables=tables_of(COUNTED, VOCAB_SIZE), memory=memory.of("another"))
    )
    np.testing.assert_allclose(other.propose(Context([4, 1]), Sampling(1.0), WIDE).q[0].probs, [4 / 5, 1 / 5])


def test_ngram_without_tables_and_memory_is_refused_with_both_keys() -> None:
    with pytest.raises(RequestError, match="keys ngram_tables, corpus_index and remember_tokens"):
        Ngram(NgramConfig(), dependencies())


# q


SAMPLINGS = (
    Sampling(),
    Sampling(1.0),
    Sampling(0.7, top_k=3),
    Sampling(1.3, top_p=0.8),
    Sampling(0.9, min_p=0.2),
    Sampling(0.8, 5, 0.9, 0.05),
)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.sampled_from(SAMPLINGS))
def test_q_is_the_request_s_law_of_the_64_best(weights: list[int], sampling: Sampling) -> None:
    ids = np.arange(len(weights)) * 3
    q = q_of(Followers(ids, np.array(weights, np.float64)), sampling)
    best = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:MAX_CANDIDATES]
    dense = np.full((1, len(weights)), -np.inf)
    dense[0, best] = np.log(np.array(weights)[best] / sum(weights[i] for i in best))
    truth = np.exp(log_p(dense, sampling))[0]
    assert q.ids.dtype == np.int32 and (np.diff(q.ids) > 0).all() and len(q.ids) <= MAX_CANDIDATES
    np.testing.assert_allclose(q.probs, truth[truth > 0], rtol=2e-7)  # as float32 has them
    assert q.ids.tolist() == (ids[truth > 0]).tolist()
    assert abs(q.probs.sum() - 1) < 1e-12


def test_q_of_more_than_64_equals_has_the_lowest_ids() -> None:
    q = q_of(Followers(np.arange(100), np.where(np.arange(100) == 99, 2.0, 1.0)), Sampling(1.0))
    assert q.ids.tolist() == [*range(63), 99]
    assert q.probs.max() == q.probs[-1] == pytest.approx(2 / 65)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_p=0.95), Sampling(1.2, top_k=4)])
def test_drawn_token_has_the_law_q_over_seeds(sampling: Sampling) -> None:
    weights = np.array([1.0, 2, 3, 5, 8, 13])
    q = q_of(Followers(np.array([2, 3, 5, 7, 11, 13]), weights), sampling)
    drawn = Counter(sample_draft(q, 17, replace(sampling, seed=seed), 16) for seed in range(4000))
    assert set(drawn) <= set(q.ids.tolist())
    assert chisquare([drawn[token] for token in q.ids.tolist()], 4000 * q.probs).pvalue > 0.01


def test_each_node_carries_the_q_it_was_drawn_from() -> None:
    """The second token's law is that after the first one drawn."""
    sampling = Sampling(1.0)
    for seed in range(50):
        proposal = proposed([1], replace(sampling, seed=seed), order=2, draft_len=2)
        first = proposal.tree.tokens.tolist()[0]
        np.testing.assert_allclose(proposal.q[0].probs, [0.8, 0.2])
        behind = {2: [1, 5], 3: [0, 3, 7]}[first]  # 3 is unknown: the unigram
        assert proposal.q[1].ids.tolist() == behind
        for node, q in enumerate(proposal.q):
            assert proposal.tree.tokens[node] == sample_draft(q, 1 + node, replace(sampling, seed=seed), 1)


# With the target


def run(target: TableTarget, proposer: Ngram, prompt: list[int], sampling: Sampling, num_tokens: int) -> Statistics:
    ids, statistics = decode(target, proposer, prompt, sampling, Limits(num_tokens, 10_000, 128))
    assert ids == reference.generate(target.logits, prompt, sampling, num_tokens)
    return statistics


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.8, 5, 0.9, 0.02)], ids=str)
def test_every_draft_is_accepted_where_q_equals_p(sampling: Sampling) -> None:
    target = TableTarget(VOCAB_SIZE, order=2, table_seed=3)
    config, num_tokens = NgramConfig(order=3, draft_len=5), 60
    for seed in range(10):
        statistics = run(
            target, Ngram(config, dependencies(tables=law_of(target))), [1, 2], replace(sampling, seed=seed), num_tokens
        )
        assert statistics.num_accepted_tokens == statistics.num_draft_tokens == 50
        assert statistics.num_steps == 10


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5),
    st.integers(1, 25),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_ngram_any_setting_gives_the_reference_s_text(
    temperature: float, seed: int, prompt: list[int], length: int, order: int, draft_len: int
) -> None:
    memory, config = NativeMemory(300), NgramConfig(order=order, draft_len=draft_len)
    target = TableTarget(VOCAB_SIZE, table_seed=seed % 5)
    memory.learn("", reference.generate(target.logits, prompt, Sampling(1.0), 50))
    for tables in (tables_of(COUNTED, VOCAB_SIZE), None):
        run(
            target,
            Ngram(config, dependencies(tables=tables, memory=memory.of(""))),
            prompt,
            Sampling(temperature, seed=seed),
            length,
        )


def test_ngram_acceptance_is_the_coupling_s_share_of_the_overlap() -> None:
    """Between (1 − TV)/(1 + TV) and 1 − TV for each first token (Daliri et al. 2024)."""
    target, sampling = TableTarget(VOCAB_SIZE, order=2, table_seed=3, sharpness=0.7), Sampling(1.0)
    p, q = np.exp(log_p(target.logits([1, 2])[None], sampling))[0], np.full(VOCAB_SIZE, 1 / VOCAB_SIZE)
    distance = float(np.abs(p - q).sum() / 2)
    flat = q_of(Followers(np.arange(VOCAB_SIZE), np.ones(VOCAB_SIZE)), sampling)
    logits: FloatArray = target.logits([1, 2])[None]
    seeds = [replace(sampling, seed=seed) for seed in range(3000)]
    same = np.mean([sample_draft(flat, 2, s, 2) == sample(logits, [2], s)[0] for s in seeds])
    assert (1 - distance) / (1 + distance) - 0.03 < same < 1 - distance + 0.03
