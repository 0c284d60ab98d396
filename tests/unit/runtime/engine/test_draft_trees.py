"""Trees of the draft engine: against trees grown from the plain model's logits, their law, and what they change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from auditor.reference import decoding as reference
from auditor.reference.decoding import dense_q
from auditor.reference.elementary import exp
from auditor.reference.logits_processors import process_logits
from auditor.reference.rules import KeyedNoise, accept_rejection
from benchmarks.stock_model import StockModel
from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import EngineError
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.proposal import Step
from orchestrator.core.sampled_drafts import check_q
from orchestrator.core.sampling_params import LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import DraftResponse, HeadInput
from orchestrator.drafting.drafter_clients import LocalDrafterClient
from orchestrator.drafting.drafters import DraftModel
from orchestrator.drafting.registry import select_method
from runtime.engine.draft import DraftEngine
from runtime.engine.local_drafter import LocalDrafter
from runtime.engine.paged import PagedModel
from runtime.engine.sampling.drafts import candidates
from runtime.models.heads.engines.ranking import rank
from runtime.models.heads.engines.sampled import sampled_children
from runtime.models.heads.engines.trees import DynamicTree
from runtime.models.heads.sharpness import Sharpness
from tests.support.decode import decode, dependencies
from tests.support.engines import EngineTarget, advance, make_paged, start_target
from tests.support.tiny_models import VOCAB_SIZE, make_like, make_tiny_target

PENALTIES = Sampling(
    0.9, repetition_penalty=1.5, frequency_penalty=0.7, seed=11, logits_options=LogitsOptions(bad_words=((5,), (3, 7)))
)
REJECTION = Sampling(1.0, seed=4, rule=Rule.REJECTION)
SAMPLINGS = {
    "greedy": Sampling(),
    "coupled": Sampling(0.8, seed=5),
    "truncated": Sampling(1.3, top_k=9, top_p=0.9, seed=2**64 - 1),
    "penalties": PENALTIES,
    "sampled": REJECTION,
    "sampled, truncated": replace(REJECTION, temperature=0.9, top_k=20),
    "sampled, penalties": replace(PENALTIES, rule=Rule.REJECTION),
    "typical": Sampling(0.9, seed=3, rule=Rule.TYPICAL),
}
SHARPNESS = Sharpness(0.6, 0.8)
#: Far below what the sound code gives by chance.
LEAST_P = 1e-5


class Bench:
    """A draft engine, and the rows of each of its passes."""

    def __init__(self, folder: Path, dtype: str = "float64", kernels: str = "torch") -> None:
        self.paged = make_paged(folder, dtype=dtype, kernels=kernels)
        self.engine = DraftEngine(self.paged, SHARPNESS)
        self.rows: list[int] = []
        forward = self.paged.forward

        def counted(segments: list[Any]) -> torch.Tensor:
            self.rows.append(sum(segment.num_tokens for segment in segments))
            return forward(segments)

        self.paged.forward = counted  # type: ignore[method-assign]

    def draft(self, *requests: DraftRequest) -> list[Any]:
        """Return the answers to calls that come together."""
        answers, _ = advance(self.engine, *requests)
        return answers


@pytest.fixture
def bench(folder: Path) -> Bench:
    return Bench(folder)


def request(
    context: Context,
    sampling: Sampling,
    width: int = 3,
    max_nodes: int = 12,
    depth: int = 4,
    sequence_id: int = 1,
    sent: int = 0,
    min_prob: float = 0.0,
) -> DraftRequest:
    draws = sampling.rule.uses_q and not sampling.greedy
    head = HeadInput(width=width, min_prob=min_prob, draws=draws)
    return DraftRequest(delta_of(context, sent, sequence_id, ""), sampling, max_nodes, depth, head)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(1, VOCAB_SIZE, length).tolist()


def expected(plain: StockModel, asked: DraftRequest, context: Context) -> DraftResponse:
    """Grow the tree from the plain model's logits, each node's computed from the start of the text."""
    head, sampling, length, q = asked.head, asked.sampling, len(context), {}
    tree = DynamicTree(head.width, asked.max_nodes, asked.max_depth, min_score=head.min_score)
    while tree.frontier:
        rows = []
        for node in tree.frontier:
            path = [tree.tokens[each] for each in tree.path(node)]
            raw, position = plain.logits([*context.ids, *path]), length + len(path)
            logits = torch.tensor(process_logits(raw, context.ids, path, sampling))[None]
            if head.draws:
                (q[node],) = candidates(logits, [sampling])
                children = sampled_children(q[node], position, sampling, length, head.width, node, SHARPNESS.sampled)
                rows.append(children)
            else:
                sharpness = SHARPNESS.argmax if sampling.greedy else 1.0
                best = rank(logits, [position], [sampling], head.width, sharpness=[sharpness])
                rows.append((best.ids.int().numpy(), best.scores.numpy(), best.scores.numpy()))
        tree.add_children(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))
    return DraftResponse(tree.token_tree(), tuple(q[tree.parents[node]] for node in tree.drafted()) if q else ())


def shape(tree: TokenTree) -> tuple[list[int], list[int]]:
    return tree.tokens.tolist(), tree.parents.tolist()


@pytest.mark.parametrize("min_prob", [0.0, 0.02])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_tree_is_the_one_that_the_plain_model_s_logits_grow(
    bench: Bench, plain: StockModel, name: str, min_prob: float
) -> None:
    context = Context(random_ids(11))
    asked = request(context, SAMPLINGS[name], min_prob=min_prob)
    (drafted,) = bench.draft(asked)
    truth = expected(plain, asked, context)
    assert shape(drafted.tree) == shape(truth.tree) and drafted.cached_len == 11
    assert max(map(len, drafted.tree.children)) > 1 and drafted.tree.depths.max() > 1
    check_q(drafted.tree, drafted.q, VOCAB_SIZE)
    assert len(drafted.q) == len(truth.q) == (drafted.tree.num_nodes if asked.head.draws else 0)
    for mine, true in zip(drafted.q, truth.q, strict=True):
        assert mine.ids.tolist() == true.ids.tolist()
        np.testing.assert_allclose(mine.probs, true.probs, rtol=1e-6)


@pytest.mark.parametrize("name", ["greedy", "coupled", "sampled"])
def test_rows_of_drafts_are_not_taken_for_those_of_the_text(bench: Bench, plain: StockModel, name: str) -> None:
    """The next text goes on along the tree, beside it, or from an earlier place; blocks of four tokens fill up."""
    context, sent = Context(random_ids(6)), 0
    for number in range(7):
        asked = request(context, SAMPLINGS[name], sent=sent)
        (drafted,) = bench.draft(asked)
        assert shape(drafted.tree) == shape(expected(plain, asked, context).tree)
        accepted = drafted.tree.paths[-1][: number % 3]
        sent = len(context)
        context.commit([*accepted, 1 + number])
    again = Context(context.ids[:9] + [7, 8])
    asked = request(again, SAMPLINGS[name])
    assert shape(bench.draft(asked)[0].tree) == shape(expected(plain, asked, again).tree)


def test_trees_and_chains_that_share_passes_are_those_of_each_alone(bench: Bench, folder: Path) -> None:
    lengths = (3, 40, 11, 300, 7, 2, 19, 5)
    calls = [
        request(Context(random_ids(length)), sampling, 1 + place % 4, 2 + 3 * place, 1 + place % 5, 1 + place)
        for place, (length, sampling) in enumerate(zip(lengths, SAMPLINGS.values(), strict=True))
    ]
    calls.append(DraftRequest(delta_of(Context(random_ids(9)), 0, 20, ""), SAMPLINGS["coupled"], 5, 5))
    calls.append(DraftRequest(delta_of(Context(random_ids(9)), 0, 21, ""), REJECTION, 5, 5))
    together = bench.draft(*calls)
    for call, answer in zip(calls, together, strict=True):
        (alone,) = Bench(folder).draft(call)
        assert shape(answer.tree) == shape(alone.tree) and len(answer.q) == len(alone.q)
        assert answer.tree.num_nodes and answer.tree.depths.max() <= call.max_depth


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_native_pass_grows_the_trees_of_the_torch_pass(native_folder: Path, name: str) -> None:
    calls = [request(Context(random_ids(length)), SAMPLINGS[name], sequence_id=length) for length in (5, 17, 70)]
    native = Bench(native_folder, "float32", "native").draft(*calls)
    torch_ = [Bench(native_folder, "float32").draft(call)[0] for call in calls]
    assert [shape(each.tree) for each in native] == [shape(each.tree) for each in torch_]


@pytest.mark.parametrize(
    ("max_nodes", "depth", "prefix_len", "levels"), [(0, 4, 5, 0), (4, 0, 5, 0), (9, 2, 5, 2), (9, 4, 510, 2), (9, 4, 512, 0)]
)  # fmt: skip
def test_a_tree_keeps_to_its_limits_and_to_the_draft_model_s_context(
    bench: Bench, max_nodes: int, depth: int, prefix_len: int, levels: int
) -> None:
    context = Context(random_ids(prefix_len))
    (drafted,) = bench.draft(request(context, Sampling(), max_nodes=max_nodes, depth=depth))
    assert drafted.tree.num_nodes <= max_nodes and drafted.tree.depths.max() == levels


@pytest.mark.parametrize("name", ["coupled", "sampled"])
def test_a_tree_whose_time_goes_ends_with_the_levels_that_it_has(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    context = Context(random_ids(9))
    (whole,) = bench.draft(request(context, SAMPLINGS[name]))
    bench.rows.clear()
    clock = SimpleNamespace(monotonic=lambda: 1e12 if len(bench.rows) > 1 else 0.0)
    monkeypatch.setattr("runtime.engine.draft.time", clock)
    (ended,) = bench.draft(request(context, SAMPLINGS[name], sequence_id=2))
    assert len(bench.rows) == 2 and ended.tree.depths.max() == 2 < whole.tree.depths.max()
    assert len(ended.q) == (ended.tree.num_nodes if whole.q else 0)


def test_sampling_for_a_rule_that_does_not_read_q_breaks_the_protocol(bench: Bench) -> None:
    asked = request(Context([1, 2, 3]), SAMPLINGS["coupled"])
    (answer,) = bench.draft(replace(asked, head=replace(asked.head, draws=True)))
    assert isinstance(answer, EngineError) and "reads q" in str(answer)


# The law of what is accepted


def p_value(counts: Counter[int], p: Sequence[float]) -> float:
    total = sum(counts.values())
    return float(stats.chisquare([counts[token] for token in range(len(p))], [total * each for each in p]).pvalue)


def test_what_is_accepted_of_sampled_trees_has_the_target_s_law(tmp_path: Path) -> None:
    vocab_size, num_seeds = 12, 1500
    make_tiny_target(tmp_path, vocab_size=vocab_size, initializer_range=0.3)
    bench, context = Bench(tmp_path), Context([3, 1, 4, 1, 5])
    answers: list[Any] = []
    for first in range(0, num_seeds, 100):
        calls = [
            request(context, replace(REJECTION, seed=seed), max_nodes=5, depth=2, sequence_id=1 + seed)
            for seed in range(first, first + 100)
        ]
        answers += bench.draft(*calls)
        for call in calls:
            bench.paged.sequences.drop(call.delta.sequence_id)
    p = exp(torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3)).double().numpy())
    p[1:] = p[1]  # after every first token the same law, so that the second one's is known
    p /= p.sum(axis=1, keepdims=True)
    drawn, first_tokens, second_tokens = Counter[int](), Counter[int](), Counter[int]()
    for seed, answer in enumerate(answers):
        tree = answer.tree
        drawn[next(iter(tree.children[0]))] += 1
        path, following = accept_rejection(tree, p, dense_q(tree, answer.q, vocab_size), 5, KeyedNoise(seed, 5))
        emitted = [*(int(tree.tokens[node - 1]) for node in path), following]
        first_tokens[emitted[0]] += 1
        second_tokens.update(emitted[1:2])
    q = dense_q(answers[0].tree, answers[0].q, vocab_size)
    assert len({shape(answer.tree)[1].__repr__() for answer in answers}) > 3
    assert p_value(drawn, q[0].tolist()) > LEAST_P
    assert p_value(first_tokens, p[0].tolist()) > LEAST_P
    assert p_value(second_tokens, p[1].tolist()) > LEAST_P and sum(second_tokens.values()) > num_seeds / 2


# Texts


class World:
    """A target and its drafters in this process."""

    def __init__(self, target: PagedModel, **drafters: PagedModel) -> None:
        self.vocab_size, self.target = target.model.vocab_size, start_target(target)
        self.drafters = {name: LocalDrafter(DraftEngine(paged, SHARPNESS)) for name, paged in drafters.items()}
        self._number = 0

    def tell(
        self, drafter: str, config: str, sampling: Sampling, prompt: list[int] | None = None, max_tokens: int = 32
    ) -> tuple[list[int], Any]:
        """Return a text and its statistics; the default prompt depends on the seed."""
        self._number += 1
        method = "draft_model" if drafter else "none"
        client = LocalDrafterClient("draft", self.drafters[drafter], "", 60.0) if drafter else None
        selected = select_method(method, config, frozenset({"draft"}), {})
        proposer = selected.proposer(dependencies(vocab_size=self.vocab_size, drafter_client=lambda name: client))
        limits = Limits(max_tokens, 400, min(selected.config.max_nodes, 64))
        prompt = prompt or random_ids(9, sampling.seed % 100)
        return decode(EngineTarget(self.target, self._number), proposer, prompt, sampling, limits)


@pytest.fixture(scope="module")
def world(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    other = tmp_path_factory.mktemp("other")
    make_like(folder, other, 0.1)
    made = World(make_paged(folder), same=make_paged(folder), other=make_paged(other))
    yield made
    made.target.close()


TREE = '{"top_k": 3, "max_nodes": 12, "draft_len": 4, "min_prob": 0}'


@pytest.mark.parametrize("drafter", ["same", "other"])
@pytest.mark.parametrize("name", ["greedy", "coupled", "truncated", "penalties"])
def test_trees_change_no_text(world: World, drafter: str, name: str) -> None:
    text, found = world.tell(drafter, TREE, SAMPLINGS[name])
    assert text == world.tell("", "", SAMPLINGS[name])[0]
    assert found.num_accepted_tokens > 0 and found.num_draft_tokens > 3 * found.num_steps


def test_of_a_target_s_own_sampled_tree_one_whole_path_is_accepted_at_every_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q is p, so the first child is always accepted; with the nodes that a tree has, its path seldom ends early."""
    seen: list[Step] = []
    monkeypatch.setattr(DraftModel, "observe", lambda self, steps: seen.extend(steps))
    for seed in range(3):
        world.tell("same", TREE, replace(REJECTION, seed=seed))
    steps = [(step.proposal.tree, step.acceptance) for step in seen]
    for tree, acceptance in steps:
        first_children = [next(iter(tree.children[0].values()), 0)]
        while below := list(tree.children[first_children[-1]].values()):
            first_children.append(below[0])
        assert list(acceptance.path) == [node for node in first_children if node]
    assert sum(len(acceptance.path) for _, acceptance in steps) > 2.5 * len(steps)


def test_a_chain_of_chosen_tokens_is_the_chain_of_the_best_ones(bench: Bench, plain: StockModel) -> None:
    context = Context(random_ids(8))
    asked = request(context, replace(REJECTION, temperature=0.7), width=1, depth=4)
    (drafted,) = bench.draft(replace(asked, head=replace(asked.head, draws=False)))
    assert drafted.tree.is_chain and not drafted.q
    assert drafted.tree.tokens.tolist() == reference.generate(plain.logits, context.ids, Sampling(), 4)
