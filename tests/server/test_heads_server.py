"""Drafting heads of the shipped deployment: their drafts are accepted, within their budget, alone and together."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from benchmarks.deployment import serving, settled_metrics
from benchmarks.traffic import mixed_prompts
from launcher import Server
from tests.support.clients import Answer, Stream, ask, until
from tests.support.deaths import await_ready, await_replaced, pid_of, unless_triton_aborts

pytestmark = [pytest.mark.server, pytest.mark.slow]

#: Method → the Triton model of its head.
METHODS = {"medusa": "medusa", "eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle3", "redrafter": "redrafter"}
PROMPT = mixed_prompts(4)[0].text
NUM_TOKENS = 40
LIMITS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "end_id": -1, "timeout_ms": 300_000}


def said(shipped: Server, method: str, salt: str, **inputs: Any) -> Answer:
    given = {"text_input": PROMPT, "speculation": method, "cache_salt": salt, **LIMITS, **inputs}
    answer = ask(shipped.grpc_url, stream=True, return_stats=True, **given)
    assert not answer.error
    return answer


def lengths(answer: Answer) -> list[int]:
    """Return the number of tokens of each step."""
    return [length for part in answer.parts for length in part.get("step_lengths", [])]


@pytest.fixture(scope="module")
def cold(shipped: Server) -> dict[str, Answer]:
    """The answer of each method with empty caches."""
    return {method: said(shipped, method, f"cold {method}") for method in ("none", *METHODS)}


@pytest.mark.parametrize("method", METHODS)
def test_a_head_s_drafts_are_accepted(cold: dict[str, Answer], method: str) -> None:
    assert cold[method].ids == cold["none"].ids
    assert len(lengths(cold[method])) < NUM_TOKENS
    assert cold[method].last["total_accepted_draft_tokens"] > 0


def at_once(shipped: Server, methods: Sequence[str], **keys: str) -> list[list[int]]:
    """Send a request under each method, all together; return their ids."""
    names = [f"r{number}" for number in range(len(methods))]
    with Stream(shipped.grpc_url) as stream:
        for name, method in zip(names, methods, strict=True):
            given = {"text_input": PROMPT, "speculation": method, "cache_salt": "together", **LIMITS, **keys}
            stream.send(name, stream=True, **given)
        return [answer.ids for answer in stream.answers(*names).values()]


def test_requests_of_all_heads_at_once_say_the_same(shipped: Server, cold: dict[str, Answer]) -> None:
    methods = [*METHODS, "prompt_lookup+eagle2", "medusa+eagle3", "none"]
    assert at_once(shipped, methods) == [cold["none"].ids] * len(methods)


def test_requests_at_once_are_drafted_for_together(shipped: Server, cold: dict[str, Answer]) -> None:
    before = settled_metrics(shipped)
    assert at_once(shipped, ["eagle2"] * 4) == [cold["none"].ids] * 4
    after = settled_metrics(shipped)
    passes, calls = (
        after["eagle", family] - before["eagle", family] for family in ("passes_total", "pass_requests_total")
    )
    assert calls > passes


@pytest.mark.parametrize("method", ["prompt_lookup+eagle2", "medusa+eagle3"])
def test_a_union_s_acceptance_is_told_by_source(shipped: Server, cold: dict[str, Answer], method: str) -> None:
    answer = said(shipped, method, f"union {method}")
    assert answer.ids == cold["none"].ids
    sources = answer.stats["sources"]
    first, second = method.split("+")
    assert set(sources) <= {first, second, method}
    assert sum(count["num_drafted"] for count in sources.values()) == answer.last["total_draft_tokens"]
    accepted = sum(count["num_accepted"] for count in sources.values())
    assert 0 < accepted == answer.last["total_accepted_draft_tokens"]


@pytest.mark.parametrize("method", METHODS)
def test_the_budget_holds(shipped: Server, method: str) -> None:
    answer = said(shipped, method, "budget", speculation_config=json.dumps({"max_nodes": 3}))
    steps = answer.stats["num_steps"]
    assert 0 < answer.last["total_draft_tokens"] <= 3 * steps


def test_typical_acceptance_is_lossy_and_says_so(shipped: Server) -> None:
    answer = said(shipped, "medusa", "typical", rule="typical", temperature=0.7, seed=3)
    assert answer.stats["rule"] == "typical (lossy)"
    assert len(answer.ids) == NUM_TOKENS


@pytest.fixture(scope="module")
def apart() -> Iterator[Server]:
    """A deployment of its own, with each head as a Triton model, whose process can be killed."""
    with serving("float32", SERVING_PLACEMENT="separate") as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3", "redrafter"])
def test_a_killed_head_costs_no_text_and_drafts_again_once_it_is_back(apart: Server, method: str) -> None:
    cold = said(apart, method, f"cold {method}")
    dead = pid_of(await_ready(apart), method)
    with unless_triton_aborts(apart), Stream(apart.grpc_url) as stream:
        given = {"text_input": PROMPT, "speculation": method, "cache_salt": f"killed {method}", **LIMITS}
        stream.send(stream=True, **given)
        first = [stream.receive() for _ in range(3)]
        os.kill(dead, signal.SIGKILL)
        answer = stream.answers("r")["r"]
    answer.responses[:0] = first
    assert (answer.error, answer.ids) == ("", cold.ids)
    await_replaced(apart, method, dead)
    # While the breaker is open nothing is drafted, and the text stays the same.
    until(lambda: said(apart, method, "healed").last["total_draft_tokens"] > 0, "drafts")
    assert apart.failure() is None
