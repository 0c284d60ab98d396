"""Chains of any method on an engine for external drafts: the target's own text, and its law above temperature 0."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.confidence import g_test
from auditor.reference.distribution import log_softmax
from benchmarks.stock_model import StockModel
from orchestrator.core.drafting import Limits
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import LogitsOptions
from orchestrator.core.types import StepOptions
from runtime.trtllm.client import TrtllmClient
from tests.support.decode import decode
from tests.support.engines import EngineTarget, ask, make_paged, start_target
from tests.support.executor import (
    GREEDY,
    LIMIT_S,
    LIMITS,
    NUM_TOKENS,
    PROMPT,
    proposer_of,
    request,
    sampled,
    serving,
    standin,
)
from tests.support.tiny_models import VOCAB_SIZE


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("none", {}),
        ("prompt_lookup", {}),
        ("prompt_lookup", {"draft_len": 64}),  # more than the engine takes
        ("ngram", {}),
        ("suffix", {"tree": False}),
        ("predicted", {}),
        ("draft_model", {"draft_len": 4}),
    ],
)
def test_chain_method_gives_the_torch_engine_s_greedy_text(
    client: TrtllmClient[StepRequest], greedy: list[int], method: str, parameters: dict[str, Any]
) -> None:
    proposer = proposer_of(method, parameters, greedy)
    text, statistics = decode(EngineTarget(client, 7), proposer, PROMPT, GREEDY, LIMITS)
    assert text == greedy
    if method == "none":
        assert statistics.num_steps == NUM_TOKENS
    else:
        assert statistics.num_accepted_tokens > 0 and statistics.num_steps < NUM_TOKENS
    if method == "draft_model":  # wrong about one in five: no draft is accepted beyond it
        assert statistics.num_accepted_tokens <= 4 * NUM_TOKENS / 5


def test_stateless_steps_give_the_same_text(client: TrtllmClient[StepRequest], greedy: list[int]) -> None:
    text, _ = decode(EngineTarget(client, 7, stateless=True), proposer_of("prompt_lookup"), PROMPT, GREEDY, LIMITS)
    assert text == greedy


def test_eight_at_once_share_iterations_and_keep_their_own_texts(folder: Path, checkpoint: Path) -> None:
    limits = Limits(12, 200, 64)
    prompts = [[n + 1, n + 2, n + 1, n + 2, 3] for n in range(8)]
    engine = start_target(make_paged(checkpoint))
    expected = [decode(EngineTarget(engine, 1), proposer_of("none"), p, GREEDY, limits)[0] for p in prompts]
    engine.close()
    texts: dict[int, list[int]] = {}

    def run(number: int) -> None:
        target = EngineTarget(client, number + 1)
        texts[number], _ = decode(target, proposer_of("prompt_lookup"), prompts[number], GREEDY, limits)
        target.release()

    with serving(folder) as client:
        enqueued = standin(client).num_enqueued
        standin(client).gate.clear()
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        with standin(client)._changed:
            assert standin(client)._changed.wait_for(lambda: standin(client).num_enqueued == enqueued + 8, LIMIT_S)
        standin(client).gate.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert standin(client).most_at_once == 8
        assert client.status().num_sequences == 0 and client.status().num_calls >= 8
    assert [texts[number] for number in range(8)] == expected


def test_draws_of_the_executor_have_the_target_s_law_whatever_is_drafted(
    client: TrtllmClient[StepRequest], checkpoint: Path
) -> None:
    """900 first tokens against p; the executor's random numbers are its own, so the seeds must be what varies."""
    rows = StockModel(checkpoint).logits(PROMPT)
    p = np.exp(log_softmax(rows[None] / 2.0))[0]
    drafts = [[], [int(p.argmax())], [1]]
    counts = np.zeros(VOCAB_SIZE)
    for seed in range(900):
        sampling = sampled(2.0, seed=seed)
        answer = ask(client, request(PROMPT, drafts[seed % 3], sampling))
        first = drafts[seed % 3][0] if answer.path else answer.next_token
        counts[first] += 1
    assert g_test(counts, p) > 1e-4


def test_steps_of_one_request_have_seeds_of_their_own(client: TrtllmClient[StepRequest]) -> None:
    seeds = []
    executor = standin(client)
    enqueue = executor.enqueue_request
    executor.enqueue_request = lambda asked: seeds.append(asked.sampling_config.seed) or enqueue(asked)
    sampling = sampled(1.0, seed=3)
    decode(EngineTarget(client, 1), proposer_of("none"), PROMPT, sampling, Limits(6, 200, 8))
    assert len(set(seeds)) == 6
    first = list(seeds)
    decode(EngineTarget(client, 2), proposer_of("none"), PROMPT, sampling, Limits(6, 200, 8))
    assert seeds[6:] == first


def test_edited_logits_go_undrafted_and_are_obeyed(client: TrtllmClient[StepRequest], greedy: list[int]) -> None:
    first = greedy[0]
    for logits_options in (LogitsOptions(bias=((first, -1000.0),)), LogitsOptions(bad_words=((first,),))):
        answer = ask(client, request(PROMPT, greedy[:3], sampled(logits_options=logits_options)))
        assert answer.path == () and answer.next_token != first
    penalised = ask(client, request(PROMPT, greedy[:3], sampled(repetition_penalty=1.3)))
    assert penalised.path == ()


def test_end_is_held_back_until_min_tokens_and_no_longer(client: TrtllmClient[StepRequest], greedy: list[int]) -> None:
    sampling = sampled(min_tokens=2, logits_options=LogitsOptions(end_ids=(greedy[0],)))
    held = ask(client, request(PROMPT, greedy[:3], sampling))
    assert held.path == () and held.next_token != greedy[0]
    free = ask(client, request(PROMPT, greedy[:3], replace(sampling, min_tokens=0)))
    assert free.path[:1] == (1,)


def test_logprobs_are_the_model_s_own(client: TrtllmClient[StepRequest], checkpoint: Path, greedy: list[int]) -> None:
    drafts = [*greedy[:2], (greedy[2] + 1) % VOCAB_SIZE]
    answer = ask(client, request(PROMPT, drafts, options=StepOptions(logprobs=True, num_top=3)))
    assert answer.path == (1, 2) and answer.next_token == greedy[2]
    plain = StockModel(checkpoint)
    rows = np.stack([plain.logits(PROMPT + greedy[:n]) for n in range(3)])
    expected = log_softmax(rows)
    np.testing.assert_allclose(answer.logprobs, expected[range(3), greedy[:3]], atol=1e-5)
    assert answer.top_ids.tolist() == np.argsort(-rows, axis=-1)[:, :3].tolist()
    np.testing.assert_allclose(answer.top_logprobs, -np.sort(-expected, axis=-1)[:, :3], atol=1e-5)
