"""What a pass decides for many requests at once equals what the reference decides for each alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchestrator.core.context import Context
from orchestrator.core.errors import RequestError
from orchestrator.core.sampling_params import OUR_RULES, LogitsOptions, Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import Distribution
from orchestrator.sampling import reference
from orchestrator.sampling.distribution import pick
from orchestrator.sampling.sampled_drafts import cut
from runtime.engine.verify import VerifyInput, verify
from runtime.sampling.accept import AcceptInput
from runtime.sampling.logits_processors import LogitsProcessors

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


def drawn_chain(rng: np.random.Generator, length: int) -> tuple[TokenTree, tuple[Distribution, ...]]:
    q = tuple(cut(np.arange(V, dtype=np.int32), rng.dirichlet(np.full(V, 0.3))) for _ in range(length))
    return TokenTree.chain([int(rng.choice(some.ids, p=some.probs)) for some in q]), q


def random_question(rng: np.random.Generator, number: int) -> tuple[VerifyInput, list[int]]:
    """A request in the middle of its output, and its prompt."""
    rule = OUR_RULES[number % len(OUR_RULES)]
    sampling = replace(SAMPLINGS[number % len(SAMPLINGS)], rule=rule, seed=number)
    drawn = rule.uses_q and number % 3 == 0
    tree, q = drawn_chain(rng, 3) if drawn else (random_tree(rng, rule is Rule.BLOCK), ())
    context = Context(rng.integers(0, V, 5).tolist())
    context.commit(rng.integers(0, V, number % 4).tolist())
    logits_processors = LogitsProcessors(sampling, context.prompt_len, None) if sampling.shaped else None
    return VerifyInput(
        AcceptInput(tree, q, len(context), sampling), context, logits_processors, number % 2 == 0
    ), context.ids[:5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(12))
def test_decisions_of_a_mixed_batch_equal_the_reference_s(seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    asked = [random_question(rng, number) for number in range(40)]
    parts = [torch.from_numpy(rng.normal(size=(question.num_rows, V)) * 2).to(dtype) for question, _ in asked]
    before = torch.cat(parts)
    verdicts = verify([question for question, _ in asked], before)
    for (question, prompt), part, verdict in zip(asked, parts, verdicts, strict=True):
        ask, context = question.accept_input, question.context
        rows = reference.shaped_rows(part.double().numpy(), ask.tree, prompt, context.output, ask.sampling)
        assert verdict.accepted == reference.decide(rows, ask.tree, ask.q, len(context), ask.sampling)
        if question.wants_target_tokens or question.is_coupled:
            assert verdict.target_tokens == pick(rows, len(context) + ask.tree.depths, ask.sampling).tolist()
        else:
            assert verdict.target_tokens is None
    assert torch.equal(before, torch.cat(parts)), "the logits themselves stay, for the log-probabilities"


def test_a_verdict_is_the_same_in_any_company() -> None:
    rng = np.random.default_rng(5)
    asked = [random_question(rng, number)[0] for number in range(30)]
    parts = [torch.from_numpy(rng.normal(size=(question.num_rows, V))) for question in asked]
    together = verify(asked, torch.cat(parts))
    assert together == [verify([question], part)[0] for question, part in zip(asked, parts, strict=True)]
    backwards = verify(asked[::-1], torch.cat(parts[::-1]))
    assert together == backwards[::-1]
    assert len({verdict.accepted for verdict in together}) > 10 and any(verdict.accepted.path for verdict in together)


class Refusing(LogitsProcessors):
    """A grammar that has grown too complex."""

    def apply(self, *given: object) -> None:
        raise RequestError("too complex")


def test_a_question_that_cannot_be_answered_gets_its_error_and_the_others_their_verdicts() -> None:
    rng = np.random.default_rng(6)
    asked = [random_question(rng, number)[0] for number in range(10)]
    parts = [torch.from_numpy(rng.normal(size=(question.num_rows, V))) for question in asked]
    sound = verify(asked, torch.cat(parts))
    for broken in range(10):
        logits_processors = Refusing(asked[broken].accept_input.sampling, 5, None)
        found = verify(
            [replace(q, logits_processors=logits_processors) if i == broken else q for i, q in enumerate(asked)],
            torch.cat(parts),
        )
        assert isinstance(found.pop(broken), RequestError)
        assert found == sound[:broken] + sound[broken + 1 :]
