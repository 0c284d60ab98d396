"""A decoded message that breaks an invariant is an EngineError that names it."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from orchestrator.core.drafting import Limits
from orchestrator.core.errors import EngineError
from orchestrator.core.messages.checks import (
    check_acceptance,
    check_draft,
    check_response,
    check_step,
    check_steps,
    checked_target_call,
)
from orchestrator.core.messages.context import Release
from orchestrator.core.messages.run import RunOptions
from orchestrator.core.proposal import Proposal, Step
from orchestrator.core.sampling_params import LogitsOptions
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import (
    Acceptance,
    Distribution,
    DraftResponse,
    EngineSpeculation,
    EngineSpeculationResult,
)
from tests.unit.orchestrator.core.messages.strategies import MAX_NODES, VOCAB_SIZE, full_draft, full_step

STEP, DRAFT, TREE = full_step(), full_draft(), TokenTree.from_paths([[4, 5], [6]])
IDS, FLAT = np.array([1, 2], np.int32), np.zeros(2, np.float32)


def sampling(**values: Any) -> dict[str, Any]:
    return {"sampling": replace(STEP.sampling, **values)}


def options(**values: Any) -> dict[str, Any]:
    return {"options": replace(STEP.options, **values)}


def logits(**values: Any) -> dict[str, Any]:
    return sampling(logits_options=LogitsOptions(**values))


def run(*limits: int, **values: Any) -> dict[str, Any]:
    return {"run": RunOptions("auto", "{}", Limits(*(limits or (8, 64, 4))), **values)}


BROKEN_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "sequence id": ({"delta": replace(STEP.delta, sequence_id=-1)}, "sequence_id must be"),
    "context": ({"delta": replace(STEP.delta, context_ids=IDS.reshape(1, 2))}, "context_ids must have 1 dim"),
    "node": ({"tree": TokenTree.chain([VOCAB_SIZE])}, "tree has a token outside"),
    "nodes": ({"tree": TokenTree.chain([1] * (MAX_NODES + 1))}, "at most 16 allowed"),
    "q": ({"q": (Distribution(IDS, FLAT + 1),)}, "there are 1 distributions q for 3 nodes"),
    "q of two dimensions": ({"q": (Distribution(IDS.reshape(1, 2), FLAT + 1),) * 3}, "q.ids must have 1 dim"),
    "temperature": (sampling(temperature=nan), "temperature must be a finite number"),
    "top_p": (sampling(top_p=1.5), r"top_p must be a finite number in 0..1, got 1.5"),
    "penalty": (sampling(repetition_penalty=0.0), "repetition_penalty must be"),
    "infinite penalty": (sampling(presence_penalty=inf), "presence_penalty must be"),
    "seed": (sampling(seed=-1), "seed must be"),
    "bias": (logits(bias=((VOCAB_SIZE, 1.0),)), "bias has an id outside 0..49"),
    "bias weight": (logits(bias=((1, nan),)), "not finite"),
    "allowed": (logits(allowed=(-1,)), "allowed has an id outside"),
    "bad words": (logits(bad_words=((1, 99),)), "bad_words has an id outside"),
    "end ids": (logits(end_ids=(99,)), "end_ids has an id outside"),
    "num_top": (options(num_top=VOCAB_SIZE + 1), "num_top must be"),
    "features_from": (options(features_from=-1), "features_from must be"),
    "engine's length": (options(engine_speculation=EngineSpeculation(0)), "length of at least 1"),
    "engine's sizes": (options(engine_speculation=EngineSpeculation(4, (), (1, 2))), "no or three sizes"),
    "deadline": ({"deadline_ms": -1}, "deadline_ms must be"),
    "max_len": ({"max_len": -1}, "max_len must be"),
    "run's limit": (run(8, -1, 4), "max_positions must be"),
    "run's stop": (run(stop_ids=(99,)), "stop_ids has an id outside"),
    "run's prediction": (run(prediction=(-1,)), "prediction has an id outside"),
}
BROKEN_DRAFTS: dict[str, tuple[dict[str, Any], str]] = {
    "max_nodes": ({"max_nodes": 129}, "max_nodes must be"),
    "max_depth": ({"max_depth": -1}, "max_depth must be"),
    "width": ({"head": replace(DRAFT.head, width=10**6)}, "width must be"),
    "min_prob": ({"head": replace(DRAFT.head, min_prob=nan)}, "min_prob must be"),
    "sharpness": ({"head": replace(DRAFT.head, sharpness=2.0)}, "sharpness must be"),
    "choices": ({"head": replace(DRAFT.head, choices=TokenTree.chain([10**6]))}, "tree has a token outside"),
    "features": ({"head": replace(DRAFT.head, features=FLAT)}, "features must have 2 dim"),
    "rows": ({"head": replace(DRAFT.head, features=np.zeros((513, 1), np.float32))}, "rows of features must be"),
}
GOOD = Acceptance((1, 2), 7)
BROKEN_ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "path": ({"path": (2,)}, "are not a path of the tree"),
    "path beyond the tree": ({"path": (1, 9)}, "are not a path of the tree"),
    "next token": ({"next_token": -1}, "next_token must be"),
    "logprobs": ({"logprobs": np.zeros(2)}, "logprobs must have 3 rows"),
    "top": ({"top_ids": np.zeros((3, 2), np.int32)}, "must have the same shape"),
    "target tokens": ({"target_tokens": IDS}, "target_tokens must have 4 rows"),
    "node top": ({"node_top_ids": np.zeros((2, 2), np.int32)}, "node_top_ids must have 4 rows"),
    "features": ({"features": FLAT}, "features must have 2 dim"),
    "engine's passes": (
        {"engine_speculation": EngineSpeculationResult("medusa", (1, 2), (2,), 4)},
        r"3 tokens, but passes of \(2,\) tokens",
    ),
}


@pytest.mark.parametrize("name", BROKEN_STEPS)
def test_a_broken_step_is_refused(name: str) -> None:
    changes, words = BROKEN_STEPS[name]
    check_step(STEP, VOCAB_SIZE, MAX_NODES)
    with pytest.raises(EngineError, match=words):
        check_step(replace(STEP, **changes), VOCAB_SIZE, MAX_NODES)


@pytest.mark.parametrize("name", BROKEN_DRAFTS)
def test_a_broken_draft_is_refused(name: str) -> None:
    changes, words = BROKEN_DRAFTS[name]
    check_draft(DRAFT)
    with pytest.raises(EngineError, match=words):
        check_draft(replace(DRAFT, **changes))


@pytest.mark.parametrize("name", BROKEN_ANSWERS)
def test_a_broken_answer_is_refused(name: str) -> None:
    changes, words = BROKEN_ANSWERS[name]
    check_acceptance(GOOD, TREE)
    with pytest.raises(EngineError, match=words):
        check_acceptance(replace(GOOD, **changes), TREE)


def test_a_drafters_tree_is_checked() -> None:
    check_response(DraftResponse(TREE), VOCAB_SIZE, MAX_NODES)
    with pytest.raises(EngineError, match="at most 2 allowed"):
        check_response(DraftResponse(TREE), VOCAB_SIZE, 2)


def test_steps_are_checked() -> None:
    check_steps([Step(Proposal.of(TREE, "auto"), GOOD, 0.0, 0.0)])
    with pytest.raises(EngineError, match="without a step"):
        check_steps([])
    with pytest.raises(EngineError, match="has 1 sources"):
        check_steps([Step(Proposal(TREE, ("auto",)), GOOD, 0.0, 0.0)])


def test_the_target_takes_only_its_own_calls() -> None:
    assert checked_target_call(STEP, VOCAB_SIZE, MAX_NODES) is STEP
    for call in (DRAFT, Release(1)):
        with pytest.raises(EngineError, match="the target takes steps"):
            checked_target_call(call, VOCAB_SIZE, MAX_NODES)
