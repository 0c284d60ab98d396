"""The results of a pass over many requests equal those of the reference for each request alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from auditor.reference import decoding as reference
from auditor.reference.distribution import sample
from orchestrator.core.context import Context
from orchestrator.core.sampled_drafts import draft_distribution
from orchestrator.core.sampling_params import OUR_RULES, LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution
from runtime.engine.sampling import distribution, served
from runtime.engine.sampling.logits_processors import LogitsProcessors
from runtime.engine.verify import VerifyInput, verify

V = 24
EDITS = LogitsOptions(bias=((3, 1.5),), allowed=tuple(range(1, 20)), bad_words=((4,), (5, 6)), end_ids=(2,))
SAMPLINGS = [
    Sampling(),
    Sampling(0.8, top_p=0.9),
    Sampling(1.2, top_k=7, min_p=0.02, typical_p=0.9),
    Sampling(repetition_penalty=1.6, presence_penalty=0.5),
    Sampling(0.9, frequency_penalty=0.4, min_tokens=50, logits_options=EDITS),
]


def random_tree(rng: np.random.Generator, is_chain: bool) -> TokenTree:
    if is_chain:
        return TokenTree.chain(rng.integers(0, V, rng.integers(0, 5)))
    return TokenTree.from_paths([rng.integers(0, V, rng.integers(0, 4)).tolist() for _ in range(rng.integers(1, 5))])


def sampled_chain(rng: np.random.Generator, length: int) -> tuple[TokenTree, tuple[Distribution, ...]]:
    q = tuple(draft_distribution(np.arange(V, dtype=np.int32), rng.dirichlet(np.full(V, 0.3))) for _ in range(length))
    return TokenTree.chain([int(rng.choice(some.ids, p=some.probs)) for some in q]), q


def random_input(rng: np.random.Generator, number: int) -> tuple[VerifyInput, list[int]]:
    """A request in the middle of its output, and its prompt."""
    rule = OUR_RULES[number % len(OUR_RULES)]
    sampling = replace(SAMPLINGS[number % len(SAMPLINGS)], rule=rule, seed=number)
    is_sampled = rule.uses_q and number % 3 == 0
    tree, q = sampled_chain(rng, 3) if is_sampled else (random_tree(rng, rule is Rule.BLOCK), ())
    context = Context(rng.integers(0, V, 5).tolist())
    context.commit(rng.integers(0, V, number % 4).tolist())
    logits_processors = LogitsProcessors(sampling, context.prompt_len) if sampling.needs_logits_processors else None
    prompt = context.ids[:5]
    return VerifyInput(tree, q, len(context), sampling, context, logits_processors, number % 2 == 0), prompt


def random_logits(rng: np.random.Generator, inputs: list[VerifyInput]) -> list[torch.Tensor]:
    return [torch.from_numpy(rng.normal(size=(len(each.positions), V)) * 2) for each in inputs]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(12))
def test_results_of_a_mixed_batch_equal_the_reference_s(seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    inputs, prompts = zip(*(random_input(rng, number) for number in range(40)), strict=True)
    logits = [rows.to(dtype) for rows in random_logits(rng, inputs)]
    before = torch.cat(logits)
    results = verify(inputs, logits)
    for each, prompt, own, result in zip(inputs, prompts, logits, results, strict=True):
        context = each.context
        rows = reference.process_tree_logits(own.double().numpy(), each.tree, prompt, context.output, each.sampling)
        assert result.accepted == reference.decide(rows, each.tree, each.q, len(context), each.sampling)
        if each.wants_target_tokens:
            assert result.target_tokens == sample(rows, len(context) + each.tree.depths, each.sampling).tolist()
        else:
            assert result.target_tokens is None
    assert torch.equal(before, torch.cat(logits)), "the logits themselves stay, for the log-probabilities"


def test_a_result_does_not_depend_on_the_other_requests() -> None:
    rng = np.random.default_rng(5)
    inputs = [random_input(rng, number)[0] for number in range(30)]
    logits = random_logits(rng, inputs)
    together = verify(inputs, logits)
    assert together == [verify([each], [rows])[0] for each, rows in zip(inputs, logits, strict=True)]
    assert together == verify(inputs[::-1], logits[::-1])[::-1]
    assert len({result.accepted for result in together}) > 10 and any(result.accepted.path for result in together)


def test_rows_without_processors_are_not_copied_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, dtypes = distribution.target_tokens, []

    def record(logits: torch.Tensor, *args: list) -> list[int]:
        dtypes.append((len(logits), logits.dtype))
        return sampled(logits, *args)

    monkeypatch.setattr(served, "on_cpu", lambda _: False)
    monkeypatch.setattr(distribution, "target_tokens", record)
    context, penalised = Context([1, 2, 3]), Sampling(repetition_penalty=1.5)
    plain = VerifyInput(TokenTree.chain([4, 5]), (), 3, Sampling(), context, None, False)
    processed = replace(plain, sampling=penalised, logits_processors=LogitsProcessors(penalised, 3))
    verify([plain, processed, plain], list(torch.randn(9, V, dtype=torch.bfloat16).split(3)))
    assert set(dtypes) == {(6, torch.bfloat16), (3, torch.float64)}


def test_masks_of_one_request_forbid_nothing_to_the_others() -> None:
    """A mask per node: what a node allows is what may follow it, and each request has rows of its own."""
    context, tree = Context([1, 2, 3]), TokenTree.from_paths([[4, 5], [6]])
    legal = np.zeros((4, V), np.bool_)
    legal[[0, 1, 2, 3], [4, 5, 7, 8]] = True
    plain = VerifyInput(tree, (), 3, Sampling(), context, None, True)
    guided = replace(plain, logits_processors=LogitsProcessors(Sampling(), 3), legal=legal)
    rows = torch.randn(4, V, generator=torch.Generator().manual_seed(3))
    first, between, last = verify([plain, guided, plain], [rows] * 3)
    assert between.target_tokens == [4, 5, 7, 8] and between.accepted == ((1, 2), 7)
    assert first == last and first.target_tokens == rows.argmax(-1).tolist()
