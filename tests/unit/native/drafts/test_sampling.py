"""Sampling in C++ against the numpy reference: every bit of log p, every token, every accepted path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.reference import distribution as reference
from auditor.reference import elementary
from auditor.reference.decoding import decide
from auditor.reference.noise import gumbel
from native import draws
from native.sampling import Rows, Sampler, Step, sampler
from orchestrator.core.arrays import FloatArray
from orchestrator.core.errors import EngineError
from orchestrator.core.noise import Stream
from orchestrator.core.sampled_drafts import draft_distribution
from orchestrator.core.sampling_params import OUR_RULES, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution
from runtime.engine.sampling import served
from tests.unit.runtime.engine.sampling.test_accept import case_of

TRUNCATIONS = (
    Sampling(1.0), Sampling(0.3), Sampling(1.7, top_k=1), Sampling(0.8, top_k=3), Sampling(0.8, top_k=10_000),
    Sampling(1.0, top_p=0.9), Sampling(1.2, top_p=0.05), Sampling(1.0, top_p=0.999), Sampling(1.0, min_p=0.2),
    Sampling(2.0, min_p=1.0), Sampling(1.0, typical_p=0.5), Sampling(0.9, top_k=40, top_p=0.8, min_p=0.05),
    Sampling(0.6, top_k=30, top_p=0.9, min_p=0.01, typical_p=0.8), Sampling(0.0), Sampling(0.0, top_k=3, top_p=0.5),
)  # fmt: skip


@pytest.fixture(scope="module")
def native() -> Sampler:
    return sampler()


def bits(x: FloatArray) -> list[int]:
    return np.ascontiguousarray(x, np.float64).view(np.int64).ravel().tolist()


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> FloatArray:
    """Peaked or flat, sometimes with many ties, sometimes with masked tokens."""
    logits = rng.normal(0.0, rng.choice([0.1, 3.0, 30.0]), (num_rows, vocab_size))
    if rng.random() < 0.3:
        logits = np.round(logits)
    if rng.random() < 0.3:
        logits[rng.random(logits.shape) < 0.4] = -np.inf
        logits[:, rng.integers(vocab_size)] = 0.0
    return logits


# log, exp


def test_log_and_exp_have_the_reference_s_bits(native: Sampler) -> None:
    rng = np.random.default_rng(1)
    edges = [0.0, -0.0, 5e-324, 2.0**-1022, 2.0**-53, 1.0, np.inf, np.nextafter(1.0, 0.0), np.sqrt(0.5), np.sqrt(2.0)]
    x = np.concatenate([edges, rng.random(200_000), np.exp(rng.normal(0.0, 100.0, 100_000))])
    for name, points in (("log", x), ("exp", np.concatenate([[-0.0, -np.inf, -708.0, -708.1], -x[x < 1000.0]]))):
        truth = bits(getattr(elementary, name)(points))
        assert bits(getattr(native, name)(points)) == truth


# The distribution, and target tokens


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 8, 9, 31, 33, 64, 300, 3000])
def test_log_p_and_target_tokens_have_the_reference_s_bits(vocab_size: int) -> None:
    rng = np.random.default_rng([3, vocab_size])
    for _ in range(3):
        samplings = [replace(each, seed=int(rng.integers(2**63)) * 2 + 1) for each in TRUNCATIONS]
        logits = random_logits(rng, len(samplings), vocab_size)
        positions = rng.integers(0, 2**31, len(samplings))
        rows = torch.from_numpy(logits)
        log_p = served.log_p(rows, samplings).numpy()
        tokens = served.target_tokens(rows, positions.tolist(), samplings)
        for row, own, token, at, each in zip(logits, log_p, tokens, positions, samplings, strict=True):
            assert bits(own) == bits(reference.log_p(row[None], each)[0]), each
            assert token == reference.sample(row[None], [at], each)[0], each


truncated = st.builds(
    Sampling,
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 100.0)),
    top_k=st.one_of(st.just(0), st.integers(1, 50)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    typical_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.lists(truncated, min_size=1, max_size=4))
def test_any_truncation_of_any_row(seed: int, vocab_size: int, samplings: list[Sampling]) -> None:
    logits = random_logits(np.random.default_rng(seed), len(samplings), vocab_size)
    truth = [bits(reference.log_p(row[None], each)[0]) for row, each in zip(logits, samplings, strict=True)]
    assert [bits(row) for row in sampler().log_p(Rows.of(logits), vocab_size, samplings)] == truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_type_of_logits(dtype: torch.dtype) -> None:
    logits = (torch.randn(40, 77, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    samplings = [replace(TRUNCATIONS[row % len(TRUNCATIONS)], seed=row) for row in range(40)]
    truth = [
        int(reference.sample(row[None], [9], each)[0])
        for row, each in zip(logits.double().numpy(), samplings, strict=True)
    ]
    assert served.target_tokens(logits, [9] * 40, samplings) == truth


def test_a_large_vocabulary_in_parts_and_on_threads(native: Sampler) -> None:
    """Peaked rows leave most parts out; flat ones none."""
    rng = np.random.default_rng(7)
    logits = rng.normal(0.0, 1.0, (24, 33_001)) * np.repeat([0.01, 1.0, 12.0], 8)[:, None]
    samplings = [Sampling(1.0, seed=int(seed)) for seed in rng.integers(2**62, size=24)]
    truth = [int(reference.sample(row[None], [4], each)[0]) for row, each in zip(logits, samplings, strict=True)]
    for num_threads in (1, 3):
        assert native.target_tokens(Rows.of(logits), 33_001, [4] * 24, samplings, num_threads) == truth


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_logits_give_a_token_of_the_vocabulary(native: Sampler, value: float) -> None:
    logits = np.zeros((2, 9))
    logits[:, 4] = value
    tree = TokenTree.chain([1])
    for rule in OUR_RULES:
        for each in (Sampling(0.0, rule=rule), Sampling(1.0, rule=rule), Sampling(1.0, top_p=0.5, rule=rule)):
            found = native.verify([Step(Rows.of(logits), tree, (), 3, each, True)], 9)[0]
            assert 0 <= found.next_token < 9
    assert native.target_tokens(Rows.of(logits), 9, [3, 3], [Sampling()] * 2) == [4, 4]


# The rules


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_every_rule_decides_as_the_reference_does(monkeypatch: pytest.MonkeyPatch, device: str, seed: int) -> None:
    if device == "GPU":
        monkeypatch.setattr(served, "on_cpu", lambda _: False)
    rng = np.random.default_rng([11, seed])
    for _ in range(150):
        vocab_size, rule = int(rng.integers(2, 41)), OUR_RULES[rng.integers(len(OUR_RULES))]
        cases = [case_of(rng, vocab_size, rule, bool(rng.random() < 0.5)) for _ in range(4)]
        each = TRUNCATIONS[rng.integers(len(TRUNCATIONS))]
        inputs = [
            replace(case.step, sampling=replace(each, rule=rule, seed=case.step.sampling.seed % 2**64))
            for case in cases
        ]
        found = served.decide(inputs, [torch.from_numpy(case.log_p) for case in cases], [True] * 4)
        for own, case, result in zip(inputs, cases, found, strict=True):
            assert result[:2] == decide(case.log_p, own.tree, own.q, own.prefix_len, own.sampling), own
            tokens = reference.sample(case.log_p, own.prefix_len + own.tree.depths, own.sampling)
            assert result.target_tokens == tokens.tolist()


def test_unwanted_target_tokens_change_no_path(native: Sampler) -> None:
    rng = np.random.default_rng(13)
    cases = [case_of(rng, 12, Rule.COUPLED, False) for _ in range(200)]
    inputs = [replace(case.step, sampling=replace(case.step.sampling, rule=Rule.COUPLED)) for case in cases]
    rows = [torch.from_numpy(case.log_p) for case in cases]
    wanted, unwanted = (served.decide(inputs, rows, [flag] * 200) for flag in (True, False))
    assert [each[:2] for each in wanted] == [each[:2] for each in unwanted]
    assert all(each.target_tokens is None for each in unwanted) and any(each.path for each in wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": [9]}, "a node's token is outside the vocabulary"),
        ({"tokens": [-1]}, "a node's token is outside the vocabulary"),
        ({"parents": [1]}, "a node's parent does not come before it"),
        ({"parents": [-1]}, "a node's parent does not come before it"),
        ({"q": 9}, "an id of q is outside the vocabulary"),
    ],
)
def test_indices_outside_are_refused(native: Sampler, change: dict[str, object], words: str) -> None:
    tree = TokenTree.chain([1])
    for name in ("tokens", "parents"):
        if name in change:
            tree.__dict__[name] = np.array(change[name], np.int32)
    q = Distribution(np.array([change.get("q", 1)], np.int32), np.ones(1, np.float32))
    step = Step(Rows.of(np.zeros((2, 9))), tree, (q,), 3, Sampling(1.0, rule=Rule.REJECTION), False)
    with pytest.raises(EngineError, match=words):
        native.verify([step], 9)


def test_block_refuses_a_tree(native: Sampler) -> None:
    tree = TokenTree.from_paths([[1], [2]])
    with pytest.raises(EngineError, match="no chain"):
        native.verify([Step(Rows.of(np.zeros((3, 9))), tree, (), 3, Sampling(1.0, rule=Rule.BLOCK), False)], 9)


# Log-probabilities, drafts, noise


@pytest.mark.parametrize("num_top", [0, 1, 5, 40])
def test_log_probabilities_have_the_reference_s_bits(num_top: int) -> None:
    rng = np.random.default_rng([17, num_top])
    logits = random_logits(rng, 20, 40)
    tokens = rng.integers(0, 40, 20).tolist()
    truth = reference.log_softmax(logits)
    rows = torch.from_numpy(logits)
    assert bits(np.array(served.log_probs_of(rows, tokens))) == bits(truth[np.arange(20), tokens])
    ids, values = served.top_log_probs(rows, num_top)
    order = np.argsort(-truth, axis=-1, kind="stable")[:, :num_top]
    assert ids.tolist() == order.tolist()
    assert bits(values) == bits(np.take_along_axis(truth, order, axis=-1))


def test_top_tokens_are_ordered_by_logits_where_their_log_probabilities_are_equal() -> None:
    """So that the first one is the argmax, and both functions agree."""
    logits = torch.tensor([[0.0, 1e-20, 1e-20, -5.0], [3.0, 1e-20, 0.0, 1e-20]])
    ids, values = served.top_log_probs(logits, 4)
    assert ids.tolist() == served.top_ids(logits, 4).tolist() == [[1, 2, 0, 3], [0, 1, 3, 2]]
    assert values[0, 0] == values[0, 2] and values[1, 1] == values[1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("num_top", [1, 2, 8, 40, 50])
def test_top_ids_are_those_of_a_stable_sort(dtype: torch.dtype, num_top: int) -> None:
    rng = np.random.default_rng([23, num_top])
    for _ in range(5):
        logits = torch.from_numpy(random_logits(rng, 20, 40)).to(dtype)
        order = np.argsort(-logits.double().numpy(), axis=-1, kind="stable")[:, :num_top]
        assert served.top_ids(logits, num_top).tolist() == order.tolist()


@pytest.mark.parametrize("size", [1, 2, 7, 33, 64, 500])
def test_draws_are_the_reference_s(size: int) -> None:
    rng = np.random.default_rng([19, size])
    for number in range(200):
        ids = np.sort(rng.choice(100_000, size, replace=False)).astype(np.int32)
        q = Distribution(ids, rng.gamma(0.3, size=size).astype(np.float32) + np.float32(1e-30))
        own = replace(TRUNCATIONS[number % len(TRUNCATIONS)], seed=int(rng.integers(2**63)))
        sampling = replace(own, rule=OUR_RULES[rng.integers(len(OUR_RULES))])
        at, node = int(rng.integers(2**31)), int(rng.integers(100))
        key = (Stream.TARGET, 0) if sampling.rule is Rule.COUPLED else (Stream.DRAFT, 77)
        scores = elementary.log(q.probs) + gumbel(sampling.seed, at, ids, *key)
        assert draws.sample_draft(q, at, sampling, 77) == ids[scores.argmax()]
        scores = elementary.log(q.probs) + gumbel(sampling.seed, at, ids, Stream.DRAFT.of_node(node), 77)
        siblings = draws.sample_siblings(q, at, sampling, 77, 3, node)
        assert siblings.tolist() == ids[np.argsort(-scores, kind="stable")[:3]].tolist()
        probs = elementary.exp(reference.log_p(elementary.log(q.probs)[None], sampling)[0])
        truth, cut = draft_distribution(ids, probs), draws.truncated(q, sampling)
        assert cut.ids.tolist() == truth.ids.tolist() and cut.weights.tolist() == truth.weights.tolist()


def test_noise_has_the_reference_s_bits() -> None:
    rng = np.random.default_rng(23)
    seeds, positions = [0, 1, 2**63, 2**64 - 1], [0, 5, 2**31, 2**32 - 1]
    tokens = rng.integers(0, 250_000, (4, 1003))
    ours = served.target_noise(seeds, positions, torch.from_numpy(tokens)).numpy()
    truth = [gumbel(*key, row, Stream.TARGET) for *key, row in zip(seeds, positions, tokens, strict=True)]
    assert bits(ours) == bits(np.array(truth))
