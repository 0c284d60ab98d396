"""The engine against plain causal forward passes: trees, ragged batches, prefix hits, eviction, cut contexts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from auditor.reference import decoding as reference
from benchmarks.stock_model import StockModel
from orchestrator.core.context import Context
from orchestrator.core.errors import EngineError, RequestError, UnknownSequence
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import HiddenStates, StepOptions
from runtime.engine.calls import EngineCall
from runtime.engine.kv.batch import Segment
from runtime.engine.paged import PagedModel
from runtime.engine.thread import EngineThread
from tests.support.engines import LIMIT_S, EngineTarget, ask, make_paged, node_paths, start_target, submit
from tests.support.tiny_models import VOCAB_SIZE

RNG = np.random.default_rng(20)


@pytest.fixture
def paged(folder: Path) -> PagedModel:
    return make_paged(folder)


@pytest.fixture
def engine(paged: PagedModel) -> Iterator[EngineThread[StepRequest]]:
    thread = start_target(paged)
    yield thread
    thread.close()


def random_ids(length: int) -> list[int]:
    return RNG.integers(1, VOCAB_SIZE, length).tolist()


def random_tree(num_nodes: int) -> TokenTree:
    parents = [int(RNG.integers(0, node + 1)) for node in range(num_nodes)]
    tokens = RNG.permutation(VOCAB_SIZE)[:num_nodes]
    return TokenTree(tokens.astype(np.int32), np.array(parents, np.int32))


def open_segment(paged: PagedModel, sequence_id: int, ids: list[int], tree: TokenTree) -> Segment:
    delta = delta_of(Context(ids), 0, sequence_id, "")
    sequence = paged.sequences.open(delta, tree.num_nodes, int(tree.depths.max()))
    return Segment(sequence, sequence.num_computed, len(ids), tree)


def expected_rows(plain: StockModel, segments: list[Segment]) -> np.ndarray:
    paths = [path for s in segments for path in node_paths(s.sequence.ids[: s.last], s.tree)]
    return np.stack([plain.logits(path) for path in paths])


@pytest.mark.parametrize("round_number", range(4))
def test_trees_in_ragged_batches_equal_plain_forward(paged: PagedModel, plain: StockModel, round_number: int) -> None:
    sizes = [(int(RNG.integers(1, 60)), int(RNG.integers(0, 20))) for _ in range(5)]
    segments = [
        open_segment(paged, i + 1, random_ids(length), random_tree(nodes)) for i, (length, nodes) in enumerate(sizes)
    ]
    logits = paged.forward(segments).numpy()
    assert np.abs(logits - expected_rows(plain, segments)).max() <= 1e-10


@pytest.mark.parametrize("stateless", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_many_steps_with_any_trees_give_the_reference_s_text(
    engine: EngineThread[StepRequest], plain: StockModel, stateless: bool, temperature: float
) -> None:
    prompt, sampling = random_ids(9), Sampling(temperature, top_p=0.95, seed=77)
    truth = reference.generate(plain.logits, prompt, sampling, 40)
    context, target = Context(prompt), EngineTarget(engine, 5, stateless)
    lengths = []
    while len(context.output) < 40:
        tree = helpful_tree(truth[len(context.output) :])
        tokens = target.step(context, tree, sampling, StepOptions()).tokens(tree)
        context.commit(tokens)
        lengths.append(len(tokens))
    assert context.output[:40] == truth
    assert max(lengths) > 2


def helpful_tree(truth: list[int]) -> TokenTree:
    """A tree that holds some of the true continuation between wrong branches."""
    depth = int(RNG.integers(0, 5))
    wrong = [random_ids(int(RNG.integers(1, 4))) for _ in range(3)]
    return TokenTree.from_paths([wrong[0], wrong[1], truth[:depth], wrong[2]])


@torch.inference_mode()
def make_paged_in_inference_mode(folder: Path) -> PagedModel:
    return make_paged(folder)


def test_branch_is_committed_whatever_mode_the_cache_was_made_in(folder: Path, plain: StockModel) -> None:
    """An accepted branch moves rows in place, on another thread than the one that made the cache."""
    engine = start_target(make_paged_in_inference_mode(folder))
    prompt = random_ids(9)
    truth = reference.generate(plain.logits, prompt, Sampling(), 5)
    context, target = Context(prompt), EngineTarget(engine, 1)
    tree = TokenTree.from_paths([[(truth[0] + 1) % VOCAB_SIZE], truth[:3]])
    try:
        for drafts in (tree, TokenTree.bare()):
            context.commit(target.step(context, drafts, Sampling(), StepOptions()).tokens(drafts))
    finally:
        engine.close()
    assert context.output == truth


def test_prefix_hit_and_eviction_equal_a_cold_cache(folder: Path, plain: StockModel) -> None:
    paged = make_paged(folder, memory_mb=1)
    engine = start_target(paged)
    shared = random_ids(40)
    try:
        for sequence_id in range(1, 60):
            prompt = shared[: int(RNG.integers(1, 41))] + random_ids(int(RNG.integers(1, 30)))
            target = EngineTarget(engine, sequence_id)
            answer = target.step(Context(prompt), TokenTree.bare(), Sampling(), StepOptions())
            assert answer.next_token == int(plain.logits(prompt).argmax())
            target.release()
        target.step(Context(shared), TokenTree.bare(), Sampling(), StepOptions())
        assert paged.sequences._live[sequence_id].num_cached >= 36
    finally:
        engine.close()


def test_long_context_is_computed_in_parts(folder: Path, plain: StockModel) -> None:
    paged = make_paged(folder, max_pass_tokens=40)
    engine = start_target(paged)
    prompt = random_ids(150)
    try:
        answer = EngineTarget(engine, 1).step(Context(prompt), random_tree(4), Sampling(), StepOptions(True))
        assert answer.target_tokens is not None
        assert answer.target_tokens[0] == int(plain.logits(prompt).argmax())
        assert engine.num_passes == 4
    finally:
        engine.close()


def test_top_tokens_of_every_node_equal_plain_forward_s_whatever_the_request_s_own_logits(
    folder: Path, plain: StockModel
) -> None:
    engine = start_target(make_paged(folder))
    prompt, tree = random_ids(12), random_tree(4)
    try:
        answer = EngineTarget(engine, 1).step(
            Context(prompt), tree, Sampling(repetition_penalty=1.9), StepOptions(num_node_top=8)
        )
    finally:
        engine.close()
    tops = [np.argsort(-plain.logits(path), kind="stable")[:8].tolist() for path in node_paths(prompt, tree)]
    assert answer.node_top_ids is not None and answer.node_top_ids.tolist() == tops


def test_picks_logprobs_and_features_equal_plain_forward(folder: Path, plain: StockModel) -> None:
    paged = make_paged(folder, features=HiddenStates.LAST)
    engine = start_target(paged)
    prompt = random_ids(12)
    truth = reference.generate(plain.logits, prompt, Sampling(), 4)
    wrong = [(truth[0] + 1) % VOCAB_SIZE, (truth[0] + 2) % VOCAB_SIZE]
    tree = TokenTree.from_paths([wrong, truth[:3]])
    try:
        answer = EngineTarget(engine, 1).step(
            Context(prompt), tree, Sampling(), StepOptions(True, True, 2, hidden_states=HiddenStates.LAST)
        )
        later = EngineTarget(engine, 1)
        later.sent = len(prompt)
        context = Context(prompt + truth)
        again = later.step(
            context, TokenTree.bare(), Sampling(), StepOptions(features_from=0, hidden_states=HiddenStates.LAST)
        )
    finally:
        engine.close()
    assert answer.path == (3, 4, 5)
    paths = node_paths(prompt, tree)
    assert answer.target_tokens is not None and answer.logprobs is not None
    assert answer.target_tokens.tolist() == [int(plain.logits(path).argmax()) for path in paths]
    assert answer.node_top_ids is None
    for logprob, row, token in zip(answer.logprobs, (0, 3, 4, 5), truth, strict=True):
        logits = plain.logits(paths[row])
        expected = logits[token] - np.logaddexp.reduce(logits)
        assert abs(logprob - expected) < 1e-9
    assert answer.features is not None and answer.features_start == 2
    hidden = plain.hidden(prompt + truth)
    assert np.allclose(answer.features, hidden[2 : len(prompt) + 3], atol=1e-5)
    assert again.features is not None and len(again.features) == len(context)
    assert np.allclose(again.features, hidden[: len(context)], atol=1e-5)


def test_unknown_sequence_is_reported(engine: EngineThread[StepRequest]) -> None:
    context = Context(random_ids(9))
    lost = delta_of(context, 6, 99, "")
    with pytest.raises(UnknownSequence):
        ask(engine, StepRequest(lost, TokenTree.bare(), Sampling(), StepOptions(), 1000))
    EngineTarget(engine, 99).step(context, TokenTree.bare(), Sampling(), StepOptions())
    other = delta_of(Context([1, *context.ids[1:]]), 6, 99, "")
    if context.ids[0] != 1:
        with pytest.raises(UnknownSequence):
            ask(engine, StepRequest(other, TokenTree.bare(), Sampling(), StepOptions(), 1000))


def test_context_beyond_the_model_and_beyond_the_pool_are_refused(folder: Path) -> None:
    engine = start_target(make_paged(folder, memory_mb=1, block_tokens=64))
    try:
        for length, reason in ((513, "513 tokens of context and draft exceed the model's 512 positions"), (512, None)):
            step = StepRequest(
                delta_of(Context(random_ids(length)), 0, length, ""),
                TokenTree.bare(), Sampling(), StepOptions(), 1000,
            )  # fmt: skip
            if reason:
                with pytest.raises(RequestError, match=reason):
                    ask(engine, step)
            else:
                ask(engine, step)
        too_long = StepRequest(
            delta_of(Context(random_ids(510)), 0, 3, ""),
            TokenTree.chain([1, 2, 3]), Sampling(), StepOptions(), 1000,
        )  # fmt: skip
        with pytest.raises(RequestError, match="513 tokens of context and draft exceed the model's 512 positions"):
            ask(engine, too_long)
    finally:
        engine.close()


def test_full_pool_lets_a_new_prompt_wait_and_keeps_the_pinned_ones(folder: Path, plain: StockModel) -> None:
    paged = make_paged(folder, memory_mb=1)
    engine = start_target(paged)
    prompts = [random_ids(500) for _ in range(3)]
    targets = [EngineTarget(engine, i + 1) for i in range(3)]
    assert paged.sequences.pool.num_blocks * 4 < 1500
    try:
        held = [
            t.step(Context(p), TokenTree.bare(), Sampling(), StepOptions())
            for t, p in zip(targets[:2], prompts[:2], strict=True)
        ]
        delta = delta_of(Context(prompts[2]), 0, 3, "")
        waiting = submit(engine, StepRequest(delta, TokenTree.bare(), Sampling(), StepOptions(), 60_000))
        context = Context([*prompts[0], held[0].next_token])
        answer = targets[0].step(context, TokenTree.bare(), Sampling(), StepOptions())
        assert answer.next_token == int(plain.logits(context.ids).argmax())
        assert waiting.empty() and engine.status().num_preempted == 0
        targets[1].release()
        assert waiting.get(timeout=LIMIT_S).next_token == int(plain.logits(prompts[2]).argmax())
    finally:
        engine.close()


def test_ids_outside_the_vocabulary_are_refused(engine: EngineThread[StepRequest]) -> None:
    for bad in (-1, VOCAB_SIZE):
        with pytest.raises(RequestError, match="outside"):
            EngineTarget(engine, 4).step(Context([1, bad]), TokenTree.bare(), Sampling(), StepOptions())


def test_a_failing_pass_refuses_the_culprit_alone(
    paged: PagedModel, plain: StockModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = paged.forward

    def poisoned(segments: list[Segment]) -> object:
        if any(13 in s.token_ids() for s in segments):
            raise RuntimeError("boom")
        return forward(segments)

    monkeypatch.setattr(paged, "forward", poisoned)
    engine = start_target(paged)
    good, bad = [5, 6, 7], [5, 13, 7]
    step = lambda ids, i: StepRequest(  # noqa: E731
        delta_of(Context(ids), 0, i, ""), TokenTree.bare(), Sampling(), StepOptions(), 1000
    )
    try:
        answers = [submit(engine, step(good, 1)), submit(engine, step(bad, 2))]
        assert answers[0].get(timeout=30).next_token == int(plain.logits(good).argmax())
        assert isinstance(answers[1].get(timeout=30), EngineError)
    finally:
        engine.close()


def planned_calls(paged: PagedModel, sizes: list[int]) -> list[int]:
    """Return which of the calls with trees of these sizes share the next pass."""
    calls = []
    for number, size in enumerate(sizes):
        tree = TokenTree(np.arange(size, dtype=np.int32), np.zeros(size, np.int32))
        delta = delta_of(Context(random_ids(3)), 0, number + 1, f"{number}")
        call = EngineCall(StepRequest(delta, tree, Sampling(), StepOptions(), 0, ()), 1e9, lambda answer: None)
        paged.open(call, size, 1)
        calls.append(call)
    planned = paged.plan(calls, lambda call: call.request.tree.num_nodes)
    return [calls.index(call) for call, _ in planned]


def test_large_trees_share_a_budget_and_small_steps_are_not_held_up(paged: PagedModel) -> None:
    assert planned_calls(paged, [100, 100, 100, 0, 8]) == [0, 1, 3, 4]


def test_a_pass_has_no_more_rows_than_native_code_takes(paged: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.paged.MAX_PASS_ROWS", 20)  # each call has three tokens, too
    assert planned_calls(paged, [10, 10, 4]) == [0, 2]
