"""Chains that native code drafts in one call are those that the torch engine drafts pass by pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.sampling_params import LogitsOptions, Rule, Sampling
from orchestrator.core.types import HeadInput
from runtime.engine.draft import DraftEngine
from runtime.engine.paged import PagedModel
from runtime.models.heads.sharpness import Sharpness
from runtime.models.load import load_model
from runtime.models.native.model import NativeModel
from tests.support.engines import advance
from tests.support.tiny_models import VOCAB_SIZE

SAMPLINGS = (Sampling(), Sampling(0.8, seed=5), Sampling(1.3, top_k=9, top_p=0.9, min_p=0.02, seed=2**64 - 1))


@pytest.fixture(scope="module")
def folder(native_folder: Path) -> Path:
    return native_folder


class Bench:
    """A draft engine over a tiny model, and the calls of the library that its drafts took."""

    def __init__(self, folder: Path, kernels: str, sharpness: float = 1.0) -> None:
        model: Any = load_model(str(folder), "cpu", "float32", kernels=kernels)
        assert isinstance(model, NativeModel) == (kernels == "native")
        self.engine = DraftEngine(PagedModel(model, 8, 4, max_pass_tokens=40), Sharpness(sharpness))
        self.num_passes = 0

    def draft(self, *requests: DraftRequest) -> list[Any]:
        """Return the answers to calls that come together."""
        answers, num_advances = advance(self.engine, *requests)
        self.num_passes += num_advances
        return answers


def request(
    length: int, sampling: Sampling, draft_len: int, sequence_id: int, sent: int = 0, min_prob: float = 0.0
) -> DraftRequest:
    ids = np.random.default_rng(sequence_id).integers(1, VOCAB_SIZE, length).tolist()
    delta = delta_of(Context(ids), sent, sequence_id, str(sequence_id))
    return DraftRequest(delta, sampling, draft_len, draft_len, HeadInput(min_prob=min_prob, sharpness=0.3))


def tokens(answers: list[Any]) -> list[list[int]]:
    assert all(answer.tree.is_chain for answer in answers)
    return [answer.tree.tokens.tolist() for answer in answers]


def test_chains_are_those_of_the_torch_engine_alone_and_together(folder: Path) -> None:
    calls = [
        request(length, sampling, draft_len, 1 + place)
        for place, (length, sampling, draft_len) in enumerate(
            zip((3, 9, 70, 17, 130, 2), 2 * SAMPLINGS, (5, 1, 3, 8, 4, 16), strict=True)
        )
    ]
    expected = [Bench(folder, "torch").draft(call)[0] for call in calls]
    assert tokens([Bench(folder, "native").draft(call)[0] for call in calls]) == tokens(expected)
    together = Bench(folder, "native").draft(*calls)
    assert tokens(together) == tokens(expected)
    assert [answer.cached_len for answer in together] == [answer.cached_len for answer in expected]


def test_a_chain_takes_one_pass_and_later_calls_go_on_from_its_cache(folder: Path) -> None:
    native, torch = Bench(folder, "native"), Bench(folder, "torch")
    for length, sent in ((8, 0), (9, 8), (13, 9), (30, 13)):
        call = request(length, SAMPLINGS[1], 6, 1, sent)
        native.num_passes = 0
        assert tokens(native.draft(call)) == tokens(torch.draft(call))
        assert native.num_passes == 1


def test_a_chain_ends_behind_a_token_whose_path_is_unlikely(folder: Path) -> None:
    """Random logits are flat, so that the sharpened confidence of a chain falls quickly."""
    calls = [
        request(length, sampling, 12, 1 + place, min_prob=min_prob)
        for place, (length, sampling, min_prob) in enumerate(
            zip((3, 9, 70, 17, 130, 2), 2 * SAMPLINGS, (0.5, 0.1, 0.01, 1e-3, 1e-4, 0.9), strict=True)
        )
    ]
    whole = tokens([Bench(folder, "native").draft(replace(call, head=HeadInput()))[0] for call in calls])
    found = tokens(Bench(folder, "native").draft(*calls))
    assert found == tokens([Bench(folder, "torch").draft(call)[0] for call in calls])
    assert found == [chain[: len(short)] for chain, short in zip(whole, found, strict=True)]
    assert 1 <= min(map(len, found)) < max(map(len, found)) <= 12


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_calls_that_name_no_sharpness_have_the_draft_model_s_own(folder: Path, kernels: str) -> None:
    named = [request(length, Sampling(), 12, 1 + length, min_prob=0.01) for length in (3, 9, 17)]
    unnamed = [replace(call, head=replace(call.head, sharpness=0.0)) for call in named]
    expected = tokens([Bench(folder, kernels).draft(call)[0] for call in named])
    assert tokens([Bench(folder, kernels, sharpness=0.3).draft(call)[0] for call in unnamed]) == expected
    assert tokens([Bench(folder, kernels).draft(call)[0] for call in unnamed]) != expected


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_where_noise_decides_a_draft_model_is_as_sure_as_its_q(folder: Path, kernels: str) -> None:
    def drafted(sharpness: float) -> list[list[int]]:
        calls = [request(length, SAMPLINGS[1], 12, 1 + length, min_prob=0.01) for length in (3, 9, 17)]
        calls = [replace(call, head=replace(call.head, sharpness=sharpness)) for call in calls]
        return tokens([Bench(folder, kernels, sharpness=0.1).draft(call)[0] for call in calls])

    assert drafted(0.0) == drafted(1.0) != drafted(0.1)


def test_under_a_rule_that_reads_q_a_chain_keeps_the_token_that_ends_it(folder: Path) -> None:
    """Leaving it out because of its own probability would bias the text."""
    call = request(9, Sampling(1.0, seed=3, rule=Rule.REJECTION), 8, 1, min_prob=0.9)
    (answer,) = Bench(folder, "native").draft(call)
    assert answer.tree.num_nodes == len(answer.q) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8, seed=3, rule=Rule.REJECTION),
        Sampling(0.8, seed=3, repetition_penalty=1.7),
        Sampling(logits_options=LogitsOptions(bias=((5, 100.0),))),
    ],
    ids=str,
)
def test_what_needs_q_or_processors_goes_token_by_token(folder: Path, sampling: Sampling) -> None:
    calls = [request(9, sampling, 4, 1), request(12, SAMPLINGS[1], 6, 2)]
    native, torch = Bench(folder, "native"), Bench(folder, "torch")
    found, expected = native.draft(*calls), torch.draft(*calls)
    assert tokens(found) == tokens(expected)
    assert len(found[0].q) == len(expected[0].q) == (4 if sampling.rule is Rule.REJECTION else 0)
    assert native.num_passes > 1
