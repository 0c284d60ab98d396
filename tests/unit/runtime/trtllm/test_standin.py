"""The stand-in for TensorRT-LLM: as strict as the project's facts say that the library is, and no second truth."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.stock_model import StockModel
from tests.standin import importable
from tests.standin.engine_folder import make_engine, tree_of
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_target

PROMPT = [5, 9, 5, 9, 12, 7]
WAIT = timedelta(seconds=30)
MAX_SEQ_LEN, MAX_DRAFT_LEN = 64, 8
TREE = tree_of(MAX_DRAFT_LEN)
TREES = {
    "medusa": lambda api: api.DecodingConfig(api.DecodingMode.Medusa(), medusa_choices=TREE),
    "eagle": lambda api: api.DecodingConfig(api.DecodingMode.Eagle(), eagle_config=api.EagleConfig(TREE)),
}


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    with importable():
        from tensorrt_llm.bindings import executor

        yield executor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def greedy(checkpoint: Path) -> list[int]:
    plain, ids = StockModel(checkpoint), list(PROMPT)
    for _ in range(12):
        ids.append(int(plain.logits(ids).argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture
def start(api: Any, checkpoint: Path, tmp_path: Path) -> Iterator[Any]:
    """Start an executor over an engine of some mode; it is shut down at the end of the test."""
    started, numbers = [], itertools.count()

    def _start(mode: str = "draft_tokens_external", decoding: Any = None, **config: Any) -> Any:
        folder = make_engine(
            tmp_path / f"engine{next(numbers)}", checkpoint, mode=mode,
            max_draft_len=MAX_DRAFT_LEN, max_seq_len=MAX_SEQ_LEN, max_batch_size=4,
        )  # fmt: skip
        decoding = decoding or TREES.get(mode, lambda api: None)(api)
        given = {"enable_chunked_context": True, "gather_generation_logits": True} | config
        settings = api.ExecutorConfig(decoding_config=decoding, **given)
        started.append(api.Executor(str(folder), api.ModelType.DECODER_ONLY, settings))
        return started[-1]

    yield _start
    for executor in started:
        executor.shutdown()


def run(executor: Any, request: Any) -> list[Any]:
    """Return the results of one request, in order."""
    request_id, results = executor.enqueue_request(request), []
    while not (results and results[-1].is_final):
        responses = executor.await_responses(timeout=WAIT)
        assert responses and {response.request_id for response in responses} == {request_id}
        assert not any(response.has_error() for response in responses)
        results += [response.result for response in responses]
    return results


def drafted(api: Any, drafts: list[int], max_tokens: int | None = None, **more: Any) -> Any:
    config = api.ExternalDraftTokensConfig(drafts) if drafts else None
    greedy = api.SamplingConfig(top_k=1)
    more = {"sampling_config": greedy, "external_draft_tokens_config": config} | more
    return api.Request(PROMPT, max_tokens or len(drafts) + 1, **more)


# What it answers


def test_plain_request_gives_input_and_greedy_text(api: Any, start: Any, greedy: list[int]) -> None:
    (result,) = run(start(), drafted(api, [], 12))
    assert result.output_token_ids == [PROMPT + greedy]
    assert result.finish_reasons == [api.FinishReason.LENGTH] and result.decoding_iter == 12


@pytest.mark.parametrize("num_right", range(4))
def test_external_drafts_are_one_verification_by_token_match(
    api: Any, start: Any, greedy: list[int], num_right: int
) -> None:
    drafts = [*greedy[:num_right], *((t + 1) % VOCAB_SIZE for t in greedy[num_right:3])]
    output = api.OutputConfig(return_perf_metrics=True)
    (result,) = run(start(), drafted(api, drafts, output_config=output))
    assert result.output_token_ids == [PROMPT + greedy[: num_right + 1]]
    metrics = result.request_perf_metrics.speculative_decoding
    assert (metrics.total_accepted_draft_tokens, metrics.total_draft_tokens) == (num_right, 3)
    assert metrics.acceptance_rate == pytest.approx(num_right / 3)


def test_streaming_answers_every_iteration_with_what_is_new(api: Any, start: Any, greedy: list[int]) -> None:
    results = run(start(), drafted(api, [], 4, streaming=True))
    assert [result.output_token_ids[0] for result in results] == [[t] for t in greedy[:4]]
    assert [result.is_final for result in results] == [False, False, False, True]
    whole = run(start(), drafted(api, [], 3, streaming=True, return_all_generated_tokens=True))
    assert [result.output_token_ids[0] for result in whole] == [greedy[:1], greedy[:2], greedy[:3]]


def test_end_id_ends_and_min_tokens_holds_it_back(api: Any, start: Any, greedy: list[int]) -> None:
    executor = start()
    (ended,) = run(executor, drafted(api, [], 12, end_id=greedy[2]))
    assert ended.output_token_ids[0][len(PROMPT) :] == greedy[: greedy.index(greedy[2]) + 1]
    assert ended.finish_reasons == [api.FinishReason.END_ID]
    held = api.SamplingConfig(top_k=1, min_tokens=3)
    (result,) = run(executor, drafted(api, [], 3, end_id=greedy[0], sampling_config=held))
    assert greedy[0] not in result.output_token_ids[0][len(PROMPT) :]


def test_seed_alone_decides_a_draw(api: Any, start: Any) -> None:
    executor = start()

    def draw(seed: int) -> list[int]:
        config = api.SamplingConfig(temperature=2.0, top_p=1.0, top_k=0, seed=seed)
        return run(executor, drafted(api, [], 8, sampling_config=config))[0].output_token_ids[0]

    assert draw(1) == draw(1) != draw(2)


def test_generation_logits_are_raw_and_padded(api: Any, start: Any, checkpoint: Path, greedy: list[int]) -> None:
    output = api.OutputConfig(return_generation_logits=True)
    (result,) = run(start(), drafted(api, greedy[:2], output_config=output))
    logits = result.generation_logits
    assert logits.shape[:2] == (1, 3) and logits.shape[2] > VOCAB_SIZE
    row = StockModel(checkpoint).logits(PROMPT + greedy[:2])
    np.testing.assert_allclose(logits[0, 2, :VOCAB_SIZE].numpy(), row, atol=1e-5)


def test_cancelled_request_is_answered_by_an_empty_final_response(api: Any, start: Any, greedy: list[int]) -> None:
    executor = start()
    executor.gate.clear()
    request_id = executor.enqueue_request(drafted(api, [], 40))
    executor.cancel_request(request_id)
    executor.gate.set()
    (response,) = executor.await_responses(timeout=WAIT)
    assert response.result.is_final and response.result.output_token_ids == [[]]
    assert response.result.finish_reasons == [api.FinishReason.CANCELLED]
    assert run(executor, drafted(api, []))[0].output_token_ids[0][-1] == greedy[0]


def test_requests_in_flight_share_iterations(api: Any, start: Any, greedy: list[int]) -> None:
    executor = start()
    executor.gate.clear()
    requests = executor.enqueue_requests([drafted(api, [], 3) for _ in range(6)])
    executor.gate.set()
    answered: dict[int, list[int]] = {}
    while len(answered) < 6:
        answered |= {r.request_id: r.result.output_token_ids[0] for r in executor.await_responses(timeout=WAIT)}
    assert answered == dict.fromkeys(requests, PROMPT + greedy[:3])
    assert executor.most_at_once == 4  # max_batch_size


@pytest.mark.parametrize("mode", ["medusa", "eagle", "explicit_draft_tokens"])
def test_engine_that_drafts_inside_says_how_many_iterations_it_took(
    api: Any, start: Any, greedy: list[int], mode: str
) -> None:
    (result,) = run(start(mode), drafted(api, [], 12))
    assert result.output_token_ids == [PROMPT + greedy]
    assert 1 < result.decoding_iter < 12
    assert result.avg_decoded_tokens_per_iter == pytest.approx(12 / result.decoding_iter)


def test_block_reuse_may_be_on_or_off(api: Any, start: Any, greedy: list[int]) -> None:
    for mode, reuse in (("draft_tokens_external", True), ("", False)):
        executor = start(mode, kv_cache_config=api.KvCacheConfig(enable_block_reuse=reuse, max_tokens=1024))
        assert run(executor, drafted(api, [], 2, cache_salt_id=3))[0].output_token_ids == [PROMPT + greedy[:2]]


# What it refuses


def test_external_drafts_need_block_reuse(api: Any, start: Any) -> None:
    with pytest.raises(RuntimeError, match="block reuse must be enabled"):
        start(kv_cache_config=api.KvCacheConfig(enable_block_reuse=False))


@pytest.mark.parametrize(
    ("request_", "given"), [(([1] * 60, 13), 4), (([1] * 60, 4), 4)], ids=["too long", "as long as there is room"]
)
def test_output_is_shortened_without_a_word(api: Any, start: Any, request_: Any, given: int) -> None:
    (result,) = run(start(), api.Request(*request_, sampling_config=api.SamplingConfig(top_k=1)))
    assert len(result.output_token_ids[0]) == 60 + given


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda api: api.ExternalDraftTokensConfig([]), RuntimeError, "!mTokens.empty()"),
        (lambda api: api.ExternalDraftTokensConfig((1, 2)), TypeError, "tokens must be list"),
        (lambda api: api.ExternalDraftTokensConfig(np.array([1])), TypeError, "tokens must be list"),
        (lambda api: api.ExternalDraftTokensConfig([np.int32(1)]), TypeError, "tokens must be list"),
        (lambda api: api.ExternalDraftTokensConfig([1], acceptance_threshold=0.0), RuntimeError, "threshold"),
        (lambda api: api.ExternalDraftTokensConfig([1], acceptance_threshold=1.5), RuntimeError, "threshold"),
        (lambda api: api.ExternalDraftTokensConfig([1], torch.zeros(2, 8)), RuntimeError, "logits are"),
        (lambda api: api.Request(PROMPT, 1, max_new_tokens=1), TypeError, "max_new_tokens"),
        (lambda api: api.Request(PROMPT, 1, True), TypeError, "positional"),
        (lambda api: api.Request(PROMPT, "1"), TypeError, "max_tokens"),
        (lambda api: api.Request(np.array(PROMPT), 1), TypeError, "input_token_ids must be list"),
        (lambda api: api.Request(PROMPT, 1, streaming=1), TypeError, "streaming"),
        (lambda api: api.Request(PROMPT, 1, bad_words=[(1,)]), TypeError, "bad_words must be list"),
        (lambda api: api.Request(PROMPT, 1, embedding_bias=[0.0]), TypeError, "embedding_bias"),
        (lambda api: api.Request(PROMPT, 1, cache_salt_id="a"), TypeError, "cache_salt_id"),
        (lambda api: api.Request(PROMPT, 1, priority=0.5), NotImplementedError, "priority"),
        (lambda api: api.SamplingConfig(random_seed=1), TypeError, "random_seed"),
        (lambda api: api.SamplingConfig(min_length=1), TypeError, "min_length"),
        (lambda api: api.SamplingConfig(top_k=1.0), TypeError, "top_k"),
        (lambda api: api.SamplingConfig(seed=-1), TypeError, "seed"),
        (lambda api: api.SamplingConfig(top_k=-1), RuntimeError, "top_k -1 < 0"),
        (lambda api: api.SamplingConfig(top_p=0.0), RuntimeError, "top_p 0.0 outside"),
        (lambda api: api.SamplingConfig(top_p=1.5), RuntimeError, "top_p 1.5 outside"),
        (lambda api: api.SamplingConfig(temperature=-0.5), RuntimeError, "temperature -0.5 < 0"),
        (lambda api: api.SamplingConfig(repetition_penalty=0.0), RuntimeError, "repetition_penalty 0.0 <= 0"),
        (lambda api: api.Request([], 1), RuntimeError, "the prompt is empty"),
        (lambda api: api.Request(PROMPT, 0), RuntimeError, "mMaxNewTokens"),
        (lambda api: api.LookaheadDecodingConfig(1, 3, 4), RuntimeError, "less than"),
        (lambda api: api.DecodingConfig(decoding_mode="medusa"), TypeError, "decoding_mode"),
        (lambda api: api.ExecutorConfig(kv_cache_config={}), TypeError, "kv_cache_config"),
    ],
)
def test_wrong_argument_is_refused_when_it_is_made(api: Any, make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        make(api)
    assert words in str(caught.value)


def test_lookahead_sizes_have_their_defaults_and_their_length(api: Any) -> None:
    assert api.LookaheadDecodingConfig().triple == (4, 3, 4)
    assert api.LookaheadDecodingConfig().draft_len == 15
    assert api.LookaheadDecodingConfig(7, 7, 7).draft_len == 83
    assert api.LookaheadDecodingConfig(1, 1, 0).draft_len == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda api: drafted(api, [1] * (MAX_DRAFT_LEN + 1)), r"Draft tokens length \(9\) exceeds maximum \(8\)"),
        (lambda api: api.Request([1] * 72, 1), r"Prompt length \(72\) exceeds maximum input length \(71\)"),
        (lambda api: drafted(api, [1, VOCAB_SIZE]), "outside of the vocabulary"),
        (lambda api: api.Request([VOCAB_SIZE], 1), "outside of the vocabulary"),
        (lambda api: api.Request([-1], 1), "outside of the vocabulary"),
        (lambda api: api.Request(PROMPT, 1, sampling_config=api.SamplingConfig(2)), "beam width"),
        (lambda api: api.Request(PROMPT, 1, output_config=api.OutputConfig(return_context_logits=True)), "context log"),
        (lambda api: api.Request(PROMPT, 1, embedding_bias=torch.zeros(3)), "embedding bias"),
        (
            lambda api: api.Request(PROMPT, 1, embedding_bias=torch.zeros(VOCAB_SIZE).half()),
            "embedding bias is torch.f",
        ),
        (lambda api: api.Request(PROMPT, 1, lookahead_config=api.LookaheadDecodingConfig()), "another engine"),
    ],
)
def test_request_beyond_the_engine_is_an_error_response(api: Any, start: Any, make: Any, words: str) -> None:
    assert re.search(words, refused(start(), make(api)))


def refused(executor: Any, request: Any) -> str:
    """Return the error with which one request is answered; nothing is raised when it is enqueued."""
    request_id = executor.enqueue_request(request)
    (response,) = executor.await_responses(timeout=WAIT)
    assert response.request_id == request_id and response.has_error()
    return response.error_msg


def test_pass_that_fails_is_an_error_of_every_request_and_no_end_of_the_thread(api: Any, start: Any) -> None:
    executor = start()
    logits, executor.engine.logits = executor.engine.logits, None
    executor.gate.clear()
    asked = set(executor.enqueue_requests([drafted(api, []), drafted(api, [])]))
    executor.gate.set()
    failed = executor.await_responses(timeout=WAIT)
    assert {response.request_id for response in failed} == asked
    assert all("error in forwardAsync" in response.error_msg for response in failed)
    executor.engine.logits = logits
    assert run(executor, drafted(api, []))


def test_engine_without_external_drafts_takes_none(api: Any, start: Any) -> None:
    for mode in ("", "medusa"):
        assert "Draft tokens length (1) exceeds maximum" in refused(start(mode), drafted(api, [1]))


def test_lookahead_engine_needs_sizes_that_fit_and_takes_smaller_ones(api: Any, start: Any, greedy: list[int]) -> None:
    with pytest.raises(RuntimeError, match="needs the executor's lookahead sizes"):
        start("lookahead_decoding")
    with pytest.raises(RuntimeError, match="more than max_draft_len"):
        start("lookahead_decoding", lookahead_of(api, 7, 7, 7))
    sizes = api.LookaheadDecodingConfig(3, 2, 3)
    executor = start("lookahead_decoding", lookahead_of(api, *sizes.triple))
    smaller = drafted(api, [], 4, lookahead_config=api.LookaheadDecodingConfig(2, 2, 1))
    assert run(executor, smaller)[0].output_token_ids == [PROMPT + greedy[:4]]
    larger = drafted(api, [], 4, lookahead_config=api.LookaheadDecodingConfig(3, 2, 4))
    assert "lookahead sizes beyond the engine's" in refused(executor, larger)


def lookahead_of(api: Any, *sizes: int) -> Any:
    """Return the executor's configuration of Lookahead."""
    return api.DecodingConfig(
        api.DecodingMode.Lookahead(), lookahead_decoding_config=api.LookaheadDecodingConfig(*sizes)
    )


def test_wrong_decoding_mode_is_overwritten_with_a_warning(
    api: Any, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    start("explicit_draft_tokens", api.DecodingConfig(decoding_mode=api.DecodingMode.TopK()))
    assert "is overwritten by the engine's" in caplog.text


def test_calls_with_wrong_arguments_are_refused(api: Any, start: Any) -> None:
    executor = start()
    with pytest.raises(TypeError, match="timedelta"):
        executor.await_responses(timeout=1.0)
    with pytest.raises(TypeError, match="must be a Request"):
        executor.enqueue_request({"input_token_ids": PROMPT})
    with pytest.raises(TypeError):
        executor.cancel_request("1")
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.enqueue_request(drafted(api, []))


def test_engine_of_another_version_is_not_loaded(api: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("1.2.1", "1.0.0"))
    with pytest.raises(RuntimeError, match=r"engine of 1\.0\.0, library 1\.2\.1"):
        api.Executor(str(folder), api.ModelType.DECODER_ONLY, api.ExecutorConfig())
