"""The draft engine against drafting token by token with the plain model and the same noise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from auditor.reference import decoding as reference
from auditor.reference.distribution import log_p
from auditor.reference.logits_processors import process_logits
from auditor.reference.noise import gumbel
from benchmarks.stock_model import StockModel
from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.noise import Stream
from orchestrator.core.sampled_drafts import MAX_CANDIDATES, check_q
from orchestrator.core.sampling_params import LogitsOptions, Rule, Sampling
from orchestrator.core.types import DraftResponse
from runtime.engine.draft import DraftEngine
from runtime.engine.paged import PagedModel
from runtime.engine.thread import EngineThread
from tests.support.engines import LIMIT_S, ask, make_paged, submit
from tests.support.tiny_models import VOCAB_SIZE

RNG = np.random.default_rng(8)
SAMPLINGS = [Sampling(), Sampling(0.8, seed=5), Sampling(1.3, top_k=9, top_p=0.9, min_p=0.02, seed=2**64 - 1)]


class Bench:
    """A draft engine in its thread, and how many tokens each of its passes computed."""

    def __init__(self, paged: PagedModel) -> None:
        self.thread: EngineThread[DraftRequest] = EngineThread(DraftEngine(paged), "test-draft")
        self.pass_tokens: list[int] = []
        forward = paged.forward

        def counted(segments: list) -> torch.Tensor:
            self.pass_tokens.append(sum(s.num_tokens for s in segments))
            return forward(segments)

        paged.forward = counted  # type: ignore[method-assign]


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    bench = Bench(make_paged(folder))
    yield bench
    bench.thread.close()


def random_ids(length: int) -> list[int]:
    return RNG.integers(1, VOCAB_SIZE, length).tolist()


def request(context: Context, sampling: Sampling, length: int, sequence_id: int = 1, sent: int = 0) -> DraftRequest:
    return DraftRequest(delta_of(context, sent, sequence_id, ""), sampling, length, length)


def chain_of(drafted: DraftResponse) -> list[int]:
    assert drafted.tree.is_chain
    return drafted.tree.tokens.tolist()


@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "truncated"])
def test_a_chain_equals_drafting_token_by_token(
    bench: Bench, plain: StockModel, sampling: Sampling, length: int
) -> None:
    bench.thread.start()
    context = Context(random_ids(11))
    drafted = ask(bench.thread, request(context, sampling, length))
    assert chain_of(drafted) == reference.generate(plain.logits, context.ids, sampling, length)
    assert drafted.cached_len == 11
    assert bench.pass_tokens == [11] + [1] * (length - 1)


def test_a_chain_follows_the_request_s_penalties_bias_and_masks(bench: Bench, plain: StockModel) -> None:
    """What was drafted counts as said, as it will when the target has accepted it."""
    logits_options = LogitsOptions(
        bias=((3, 2.0),), allowed=tuple(range(2, 30)), bad_words=((5,), (3, 7)), end_ids=(9,)
    )
    sampling = Sampling(
        0.9, repetition_penalty=1.5, frequency_penalty=0.7, min_tokens=5, seed=11, logits_options=logits_options
    )
    bench.thread.start()
    context = Context(random_ids(9))
    for sequence_id, rules in enumerate((sampling, replace(sampling, temperature=0.0)), start=1):
        chain = chain_of(ask(bench.thread, request(context, rules, 8, sequence_id)))
        assert chain == reference.generate(plain.logits, context.ids, rules, 8)
        assert chain != reference.generate(plain.logits, context.ids, Sampling(rules.temperature, seed=11), 8)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_a_drawn_chain_carries_the_q_that_its_own_noise_drew_from(bench: Bench, plain: StockModel, rule: Rule) -> None:
    bench.thread.start()
    context, sampling = Context(random_ids(9)), Sampling(0.9, top_k=70, repetition_penalty=1.3, seed=4, rule=rule)
    drafted = ask(bench.thread, request(context, sampling, 6))
    check_q(drafted.tree, drafted.q, VOCAB_SIZE)
    tokens = chain_of(drafted)
    for depth, (token, q) in enumerate(zip(tokens, drafted.q, strict=True)):
        said = [*context.ids, *tokens[:depth]]
        truth = np.exp(log_p(process_logits(plain.logits(said), said, [], sampling)[None], sampling)[0])
        kept = np.sort(np.argsort(-truth)[:MAX_CANDIDATES])
        kept = kept[truth[kept] > 0]
        assert q.ids.tolist() == kept.tolist()
        np.testing.assert_allclose(q.probs, truth[kept] / truth[kept].sum(), rtol=1e-6)
        noise = gumbel(sampling.seed, 9 + depth, q.ids, Stream.DRAFT, 9)
        assert token == q.ids[(np.log(q.probs) + noise).argmax()]
    assert tokens != reference.generate(plain.logits, context.ids, replace(sampling, rule=Rule.COUPLED), 6)
    assert not ask(bench.thread, request(context, replace(sampling, rule=Rule.COUPLED), 6, 2)).q


@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION])
def test_a_chain_whose_time_goes_ends_with_what_it_has(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    """Were it refused as a whole, the tokens that cost the time would never be drafted."""
    bench.thread.start()
    context, sampling = Context(random_ids(9)), Sampling(0.9, seed=4, rule=rule)
    whole = ask(bench.thread, request(context, sampling, 6))
    bench.pass_tokens.clear()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (0.6 * LIMIT_S if len(bench.pass_tokens) > 2 else 0.0))
    monkeypatch.setattr("runtime.engine.draft.time", clock)
    ended = ask(bench.thread, request(context, sampling, 6, 2))
    assert chain_of(ended) == chain_of(whole)[:3] and len(ended.q) == (3 if whole.q else 0)


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
def test_what_the_target_accepts_is_found_computed(
    bench: Bench, plain: StockModel, sampling: Sampling, accepted: int
) -> None:
    """Of four drafted tokens the target keeps some and adds its own; only what follows them is computed again."""
    bench.thread.start()
    context, sent, first_pass = Context(random_ids(10)), 0, 10
    for _ in range(4):
        bench.pass_tokens.clear()
        chain = chain_of(ask(bench.thread, request(context, sampling, 4, sent=sent)))
        assert chain == reference.generate(plain.logits, context.ids, sampling, 4)
        assert bench.pass_tokens == [first_pass, 1, 1, 1]
        sent = len(context)
        context.commit([*chain[:accepted], (chain[min(accepted, 3)] + 1) % VOCAB_SIZE])
        # The fourth drafted token was only picked, never computed.
        first_pass = 2 if accepted == 4 else 1


def test_a_batch_of_all_lengths_and_samplings_drafts_as_each_alone(bench: Bench, plain: StockModel) -> None:
    """Queued before the engine starts, so that they share its passes; a long context is computed in parts."""
    cases = [
        (Context(random_ids(int(RNG.integers(1, 40)))), sampling, length)
        for sampling in SAMPLINGS
        for length in (1, 4, 8)
    ]
    cases.append((Context(random_ids(300)), SAMPLINGS[1], 4))
    answers = [
        submit(bench.thread, request(context, sampling, length, sequence_id=i + 1))
        for i, (context, sampling, length) in enumerate(cases)
    ]
    bench.thread.start()
    for (context, sampling, length), answer in zip(cases, answers, strict=True):
        truth = reference.generate(plain.logits, context.ids, sampling, length)
        assert chain_of(answer.get(timeout=60)) == truth
    assert len(bench.pass_tokens) < 20


@pytest.mark.parametrize(("max_nodes", "max_depth", "length"), [(0, 4, 0), (4, 0, 0), (-1, 4, 0), (3, 8, 3), (8, 2, 2)])
def test_a_chain_keeps_to_both_limits_and_none_is_a_bare_root(
    bench: Bench, plain: StockModel, max_nodes: int, max_depth: int, length: int
) -> None:
    bench.thread.start()
    context = Context(random_ids(5))
    delta = delta_of(context, 0, 1, "")
    chain = chain_of(ask(bench.thread, DraftRequest(delta, Sampling(), max_nodes, max_depth)))
    assert chain == reference.generate(plain.logits, context.ids, Sampling(), length)
    assert len(bench.pass_tokens) == length


def test_drafts_that_raise_do_not_affect_other_calls(
    bench: Bench, plain: StockModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure *after* the forward pass: the others must be drafted from the start again, at once."""
    from runtime.engine.sampling import served as runtime_sampling

    target_tokens = runtime_sampling.target_tokens

    def poisoned(logits: torch.Tensor, positions: list[int], rules: list[Sampling]) -> list[int]:
        if any(rule.seed == 13 for rule in rules):
            raise RuntimeError("boom")
        return target_tokens(logits, positions, rules)

    monkeypatch.setattr(runtime_sampling, "target_tokens", poisoned)
    context = Context(random_ids(12))
    good = [submit(bench.thread, request(context, Sampling(), 4, i)) for i in (1, 3)]
    bad = submit(bench.thread, request(context, Sampling(1.0, seed=13), 4, 2))
    began_s = time.monotonic()
    bench.thread.start()
    truth = reference.generate(plain.logits, context.ids, Sampling(), 4)
    assert [chain_of(answer.get(timeout=30)) for answer in good] == [truth, truth]
    assert "the engine failed on this request" in str(bad.get(timeout=30))
    assert time.monotonic() - began_s < 20
