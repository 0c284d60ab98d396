"""Engines that draft by themselves: one request of the executor for a whole text, told step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from orchestrator.core.context import Context
from orchestrator.core.drafting import Limits
from orchestrator.core.errors import EngineError, RequestError, Unavailable
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.types import EngineSpeculation, EngineSpeculationResult, StepOptions
from runtime.trtllm import contexts
from runtime.trtllm.client import TrtllmClient
from tests.standin.engine_folder import BUILD_MODES, make_engine
from tests.support.clients import until
from tests.support.decode import decode
from tests.support.engines import EngineTarget, ask, submit
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

Client = TrtllmClient[StepRequest]
MODES = tuple(BUILD_MODES)
#: Tokens that a pass verifies, of engines as tests/standin/engine_folder.py makes them.
NUM_NODES = dict.fromkeys(MODES, 16) | {"lookahead_decoding": 15}
ASKED = StepOptions(engine_speculation=EngineSpeculation(NUM_TOKENS))


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    """Serve an engine that drafts by itself."""
    with ExitStack() as stack:
        yield lambda mode, **options: stack.enter_context(
            serving(make_engine(tmp_path / f"engine {mode}", checkpoint, mode=mode, **options))
        )


def said(burst: Any) -> list[int]:
    """The tokens of an answer."""
    return [*burst.extra, burst.next_token]


def hold(client: Client) -> Any:
    """Stop the executor before its next pass; it is free again once the test has let it."""
    standin(client).gate.clear()
    return standin(client)


@pytest.mark.parametrize("mode", MODES)
def test_text_is_the_torch_engine_s_in_fewer_passes_than_tokens(
    start: Callable[..., Client], greedy: list[int], mode: str
) -> None:
    client, method = start(mode), BUILD_MODES[mode]
    before = standin(client).num_enqueued
    text, statistics = decode(EngineTarget(client, 2), proposer_of(method, inside=method), PROMPT, GREEDY, LIMITS)
    assert text == greedy
    assert standin(client).num_enqueued == before + 1  # one request for the whole text
    assert statistics.num_steps < NUM_TOKENS and sum(statistics.step_lengths) == NUM_TOKENS
    assert statistics.num_accepted_tokens == NUM_TOKENS - statistics.num_steps
    # The first pass has no drafts, all others have as many as the engine was built for.
    assert statistics.num_draft_tokens == NUM_NODES[mode] * (statistics.num_steps - 1)
    assert list(statistics.sources) == [method]
    assert statistics.sources[method].num_accepted == statistics.num_accepted_tokens < statistics.num_draft_tokens


@pytest.mark.parametrize("mode", MODES)
def test_passes_are_told_as_the_executor_counts_them(start: Callable[..., Client], mode: str) -> None:
    client = start(mode)
    burst = ask(client, request(PROMPT, options=ASKED)).engine_speculation
    first = standin(client).num_passes
    assert isinstance(burst, EngineSpeculationResult) and burst.method == BUILD_MODES[mode]
    assert sum(burst.lengths) == len(burst.extra) + 1 and len(burst.lengths) <= first
    assert burst.num_drafted == NUM_NODES[mode] * (len(burst.lengths) - 1)


def test_what_comes_between_two_steps_is_told_by_the_next(start: Callable[..., Client], greedy: list[int]) -> None:
    client, context = start("medusa"), Context(PROMPT)
    target, executor = EngineTarget(client, 3), standin(client)
    executor._iterate = _paused_after(executor, 1)
    first = target.step(context, request(PROMPT).tree, GREEDY, ASKED)
    context.commit(said(first))
    executor.gate.set()
    until(lambda: client._in_flight.of_sequence(3).is_final, "the rest, while nobody asks")
    second = target.step(context, request(PROMPT).tree, GREEDY, ASKED)
    assert said(first) + said(second) == greedy
    assert len(second.engine_speculation.lengths) > 1
    assert executor.num_enqueued == 2  # the warm-up's, and this
    assert client._in_flight.of_sequence(3) is None


def test_none_is_one_token_of_one_pass_without_drafts(start: Callable[..., Client], greedy: list[int]) -> None:
    client = start("eagle")
    text, statistics = decode(EngineTarget(client, 2), proposer_of("none"), PROMPT, GREEDY, Limits(6, 200, 8))
    assert text == greedy[:6]
    assert statistics.num_steps == 6 and statistics.num_draft_tokens == 0
    assert standin(client).num_enqueued == 1 + 6


def test_step_with_other_tokens_or_wishes_begins_anew(start: Callable[..., Client], greedy: list[int]) -> None:
    client = start("lookahead_decoding")
    began = standin(client).num_enqueued
    ask(client, request(PROMPT, options=ASKED))
    other = [*PROMPT, (greedy[0] + 1) % 50]
    second = ask(client, request(other, options=ASKED))
    assert standin(client).num_enqueued == began + 2
    fewer = StepOptions(engine_speculation=EngineSpeculation(NUM_TOKENS, sizes=(2, 2, 1)))
    burst = ask(client, request(other + said(second), options=fewer)).engine_speculation
    assert burst.num_drafted == 2 * (len(burst.lengths) - 1)
    assert standin(client).num_enqueued == began + 3


def test_release_cancels_the_rest_of_the_text(start: Callable[..., Client]) -> None:
    client = start("medusa")
    executor = standin(client)
    num_cancelled = len(executor.cancelled)
    executor._iterate = _paused_after(executor, 3)
    ask(client, request(PROMPT, options=StepOptions(engine_speculation=EngineSpeculation(200))))
    client.release(1)
    assert len(executor.cancelled) == num_cancelled + 1
    executor.gate.set()
    with executor._changed:
        assert executor._changed.wait_for(lambda: not executor._active, LIMIT_S)
    assert client.status().num_sequences == 0


def _paused_after(executor: Any, num_passes: int) -> Callable[[Any], Any]:
    """Let the executor run so many passes, then wait at its gate, once."""
    iterate, passes = executor._iterate, itertools.count(1)

    def counted(active: Any) -> Any:
        if next(passes) == num_passes:
            executor.gate.clear()
        return iterate(active)

    return counted


def test_deadline_cancels_the_rest_of_the_text(start: Callable[..., Client]) -> None:
    client = start("medusa")
    executor = hold(client)
    num_cancelled = len(executor.cancelled)
    answers: SimpleQueue[Any] = SimpleQueue()
    client.submit(request(PROMPT, options=ASKED), 0.0, answers.put)
    assert isinstance(answers.get(timeout=LIMIT_S), Unavailable)
    assert len(executor.cancelled) == num_cancelled + 1
    executor.gate.set()


def test_text_of_a_sequence_that_fell_silent_is_cancelled(
    start: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start("medusa")
    executor = standin(client)
    num_cancelled = len(executor.cancelled)
    executor._iterate = _paused_after(executor, 1)
    ask(client, request(PROMPT, options=StepOptions(engine_speculation=EngineSpeculation(200))))
    assert len(executor.cancelled) == num_cancelled
    monkeypatch.setattr(contexts, "IDLE_S", 0.0)
    until(lambda: len(executor.cancelled) == num_cancelled + 1, "the end of what nobody asks for")
    executor.gate.set()
    assert client.status().num_sequences == 0


def test_sequence_with_a_call_under_way_is_not_silent(
    start: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the call waits in the executor's queue; and only from its answer on."""
    client = start("medusa")
    executor = hold(client)
    before = list(executor.cancelled)
    answers = submit(client, request(PROMPT, options=StepOptions(engine_speculation=EngineSpeculation(200))))
    client._contexts._used_s[1] -= contexts.IDLE_S + 1  # so long ago did the call come
    looked: list[float] = []
    drop_idle = client._contexts.drop_idle
    monkeypatch.setattr(
        client._contexts, "drop_idle", lambda now_s, busy: looked.append(now_s) or drop_idle(now_s, busy)
    )
    until(lambda: len(looked) > 3, "looks for silent ones")
    assert client.status().num_sequences == 1
    executor._iterate = _paused_after(executor, 1)
    executor.gate.set()
    first = answers.get(timeout=LIMIT_S)
    reports: SimpleQueue[Any] = SimpleQueue()
    client.watch(reports.put)
    reports.get(timeout=LIMIT_S), reports.get(timeout=LIMIT_S)  # the client has looked for silent ones meanwhile
    assert client.status().num_sequences == 1 and executor.cancelled == before
    executor.gate.set()
    assert ask(
        client,
        request(
            PROMPT + said(first), options=StepOptions(engine_speculation=EngineSpeculation(150)), prompt_len=len(PROMPT)
        ),
    ).engine_speculation
    assert executor.num_enqueued == 2


def test_eight_at_once_share_the_executor_s_passes(start: Callable[..., Client], greedy: list[int]) -> None:
    client = start("explicit_draft_tokens")
    executor = hold(client)
    began = executor.num_enqueued
    waiting = [submit(client, request(PROMPT, options=ASKED, sequence_id=number)) for number in range(2, 10)]
    assert executor.num_enqueued == began + 8
    executor.gate.set()
    answers = [queue.get(timeout=LIMIT_S) for queue in waiting]
    assert executor.most_at_once == 8
    for answer in answers:
        assert said(answer) == greedy[: len(said(answer))]


def test_failure_between_steps_is_reported_to_the_next_step(start: Callable[..., Client]) -> None:
    client = start("medusa")
    executor = standin(client)
    executor._iterate = _paused_after(executor, 1)
    first = ask(client, request(PROMPT, options=ASKED))
    executor.poison = PROMPT[0]
    executor.gate.set()
    with pytest.raises(EngineError, match="poisoned"):
        ask(client, request(PROMPT + said(first), options=ASKED, prompt_len=len(PROMPT)))


@pytest.mark.parametrize(
    ("sizes", "num_nodes"), [((2, 2, 1), 2), ((3, 2, 2), 4), ((4, 3, 4), 15), ((1, 1, 0), 0)], ids=str
)
def test_lookahead_takes_smaller_sizes_per_request(
    start: Callable[..., Client], greedy: list[int], sizes: tuple[int, int, int], num_nodes: int
) -> None:
    client = start("lookahead_decoding")
    parameters = dict(zip(("window", "ngram", "guesses"), sizes, strict=True))
    asked: list[Any] = []
    enqueue = standin(client).enqueue_request
    standin(client).enqueue_request = lambda request: asked.append(request.lookahead_config.triple) or enqueue(request)
    proposer = proposer_of("lookahead", parameters, inside="lookahead")
    text, statistics = decode(EngineTarget(client, 2), proposer, PROMPT, GREEDY, LIMITS)
    assert text == greedy and asked == [sizes]
    assert statistics.num_draft_tokens == num_nodes * (statistics.num_steps - 1)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((5, 3, 4), r"in \(2, 2, 1\) to \(4, 3, 4\), .* got \(5, 3, 4\)"), ((1, 2, 1), r"got \(1, 2, 1\)")],
)
def test_lookahead_beyond_the_engine_is_refused_with_its_sizes(
    start: Callable[..., Client], sizes: tuple[int, ...], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        ask(
            start("lookahead_decoding"),
            request(PROMPT, options=StepOptions(engine_speculation=EngineSpeculation(8, sizes=sizes))),
        )


def test_eagle_takes_the_shape_of_its_tree_per_request(start: Callable[..., Client], greedy: list[int]) -> None:
    client = start("eagle")
    proposer = proposer_of("eagle", {"choices": [[0, 0, 0, 0], [1]]}, inside="eagle")
    asked: list[Any] = []
    enqueue = standin(client).enqueue_request
    standin(client).enqueue_request = lambda request: (
        asked.append(request.eagle_config.eagle_choices) or enqueue(request)
    )
    text, statistics = decode(EngineTarget(client, 2), proposer, PROMPT, GREEDY, LIMITS)
    assert text == greedy and asked == [[[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]]
    assert 1 < max(statistics.step_lengths) <= 5
    assert statistics.num_draft_tokens == 5 * (statistics.num_steps - 1)


def test_eagle_tree_beyond_the_engine_is_refused_with_its_size(start: Callable[..., Client]) -> None:
    client = start("eagle")
    parents, deep = [(rank,) for rank in range(4)], [(0,) * depth for depth in range(2, 5)]
    for choices, words in {
        tuple((rank,) for rank in range(17)): "17 nodes, the engine was built for at most 16",
        tuple((0,) * depth for depth in range(1, 6)): "5 levels, the engine was built for at most 4",
        ((0,), (1,), (0, 0)): r"2 levels, the engine needs exactly 4 \(eagle_layers\)",
    }.items():
        asked = request(PROMPT, options=StepOptions(engine_speculation=EngineSpeculation(8, choices=choices)))
        with pytest.raises(RequestError, match=f"choices has {words}"):
            ask(client, asked)
    most = (*parents, *deep, *((rank, 0) for rank in range(1, 4)))
    assert ask(
        client, request(PROMPT, options=StepOptions(engine_speculation=EngineSpeculation(8, choices=most)))
    ).engine_speculation


@pytest.mark.parametrize(
    ("method", "parameters", "words"),
    [
        ("medusa", {"choices": [[0]]}, "unknown key of medusa 'choices'"),
        ("medusa", {"max_nodes": 8}, "max_nodes must be"),
        ("lookahead", {"window": 2}, "window, ngram and guesses go together"),
        ("lookahead", {"pool_from_prompt": True}, "unknown key of lookahead"),
        ("redrafter", {"beams": 2}, "unknown key of redrafter"),
    ],
)
def test_parameter_that_the_engine_does_not_take_per_request_is_refused(
    method: str, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        proposer_of(method, parameters, inside=method)


def test_passes_that_one_response_sums_up_are_counted(start: Callable[..., Client]) -> None:
    client = start("medusa")
    executor = standin(client)
    iterate = executor._iterate

    def summed(active: Any) -> Any:
        response = iterate(active)
        response.result.decoding_iter += 1  # as if another pass lay after it
        response.result.output_token_ids[0].append(7)
        return response

    executor._iterate = summed
    answer = ask(client, request(PROMPT, options=StepOptions(engine_speculation=EngineSpeculation(200))))
    assert answer.engine_speculation.lengths[:2] == (1, 1) and sum(answer.engine_speculation.lengths) == len(
        said(answer)
    )


def spoil(client: Client, pass_number: int, change: Callable[[Any], Any]) -> None:
    """Let the response of one pass from now be changed."""
    executor, passes = standin(client), itertools.count(1)
    iterate = executor._iterate

    def spoiled(active: Any) -> Any:
        response = iterate(active)
        return change(response) if next(passes) == pass_number else response

    executor._iterate = spoiled


def _emptied(response: Any) -> Any:
    response.result.output_token_ids[0].clear()
    return response


def test_pass_without_a_token_is_held_back(start: Callable[..., Client]) -> None:
    client = start("medusa")
    executor = standin(client)
    spoil(client, 1, _emptied)
    assert ask(client, request(PROMPT, options=ASKED)).engine_speculation
    assert executor.num_enqueued == 2


@pytest.mark.parametrize(
    ("tokens", "words"),
    [([64], r"the token 64, outside of 0\.\.63"), ([-1], "the token -1"), ([1] * 33, r"\d+ new tokens, at most 32")],
)
def test_stream_of_what_was_not_asked_for_is_an_error(
    start: Callable[..., Client], tokens: list[int], words: str
) -> None:
    client = start("medusa")

    def told(response: Any) -> Any:
        response.result.output_token_ids[0][:] = tokens
        return response

    spoil(client, 1, told)
    with pytest.raises(EngineError, match=words):
        ask(client, request(PROMPT, options=ASKED))


@pytest.mark.parametrize("mode", MODES)
def test_temperature_and_log_probabilities_are_refused(start: Callable[..., Client], mode: str) -> None:
    client = start(mode)
    with pytest.raises(RequestError, match="temperature: it is not established"):
        ask(client, request(PROMPT, sampling=sampled(1.0), options=ASKED))
    with pytest.raises(RequestError, match="log-probabilities: it is not established"):
        ask(client, request(PROMPT, options=StepOptions(logprobs=True)))


def test_output_cut_at_a_stop_counts_what_the_client_gets(start: Callable[..., Client], greedy: list[int]) -> None:
    client = start("medusa")
    stop = next(token for i, token in enumerate(greedy) if i > 8 and token not in greedy[:i])
    place = greedy.index(stop)
    proposer = proposer_of("medusa", inside="medusa")
    text, statistics = decode(EngineTarget(client, 2), proposer, PROMPT, GREEDY, LIMITS, frozenset({stop}))
    assert text == greedy[: place + 1]
    assert sum(statistics.step_lengths) == place + 1
    assert statistics.num_accepted_tokens <= place + 1
    assert np.min(statistics.step_lengths) >= 1
