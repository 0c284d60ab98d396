"""The client to NVIDIA's backend without Triton: its Triton model is a function that answers what a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from launcher.deployment import models_to_load
from orchestrator.core.context import Context
from orchestrator.core.deployment.capabilities import capabilities_of
from orchestrator.core.deployment.config import BACKEND_MODELS, ServingConfig
from orchestrator.core.errors import ConfigError, EngineError, EngineLost, RequestError, Unavailable, UnknownSequence
from orchestrator.core.messages.context import delta_of
from orchestrator.core.messages.drafter import DraftRequest
from orchestrator.core.messages.target import StepRequest
from orchestrator.core.sampling_params import Rule, Sampling
from orchestrator.core.tree import TokenTree
from orchestrator.core.types import EngineSpeculation, EngineSpeculationResult, StepOptions
from runtime.engine.build_engines import build_draft, build_target
from runtime.trtllm.backend.adapters import DraftAdapter, EngineSideAdapter, StepAdapter
from runtime.trtllm.backend.tensors import ACCEPTED, DRAFTED, OUTPUTS, Backend, draft_tensors, stop_tensors
from runtime.trtllm.backend.transport import BackendTransport, ModelInput
from runtime.trtllm.client import TrtllmClient
from tests.standin.engine_folder import BUILD_MODES, make_engine
from tests.support.clients import until
from tests.support.engines import ask, submit
from tests.support.tiny_models import make_tiny_target
from tests.unit.runtime.trtllm.test_backend_tensors import DTYPES, INPUTS

PROMPT = [5, 9, 5, 9]
BACKEND = Backend(vocab_size=64, max_seq_len=20, max_draft_len=3)
LIMIT_S = 30.0


class FakeModel:
    """Answers with a token that follows from the length, drafts accepted where they equal it; may be held or broken."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Semaphore(0)
        self.fails: Exception | None = None

    def __call__(self, tensors: Any, outputs: Any, request_id: str, limit_s: float) -> dict[str, Any]:
        assert tuple(outputs) == OUTPUTS and limit_s > 0
        self.calls.append({name: tensor.tolist() for name, tensor in tensors.items()})
        self.ids.append(request_id)
        self.began.release()
        if "stop" in tensors:
            return {}
        if not self.go.wait(min(limit_s, LIMIT_S)):
            raise EngineLost("the process that was called has gone, or does not answer")
        if self.fails:
            raise self.fails
        ids = tensors["input_ids"][0].tolist()
        drafts = tensors["draft_input_ids"][0].tolist() if "draft_input_ids" in tensors else []
        for _, draft in zip(range(tensors["request_output_len"].item()), [*drafts, None, *[None] * 40], strict=False):
            ids.append(said(len(ids)))
            if drafts and ids[-1] != draft:
                break
        return {"output_ids": np.array([[ids]], np.int32), "sequence_length": np.array([[len(ids)]], np.int32)}


def said(position: int) -> int:
    return (7 * position) % 60


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def client(model: FakeModel) -> Iterator[TrtllmClient[StepRequest]]:
    with running(client_of(StepAdapter(BACKEND, True), model, 4, "test")) as started:
        yield started


def client_of(adapter: Any, model: Any, num_threads: int, name: str) -> TrtllmClient[Any]:
    return TrtllmClient(BackendTransport(model, num_threads, name), adapter, name)


class running:  # noqa: N801
    """A client for the length of a with statement."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __enter__(self) -> Any:
        self.client.start()
        return self.client

    def __exit__(self, *error: object) -> None:
        self.client.close()


def step(ids: list[int], drafts: Any = (), sequence_id: int = 1, start: int = 0, salt: str = "") -> StepRequest:
    tree = drafts if isinstance(drafts, TokenTree) else TokenTree.chain(list(drafts))
    delta = delta_of(Context(ids), start, sequence_id, salt)
    return StepRequest(delta, tree, Sampling(rule=Rule.ENGINE), StepOptions(), 60_000)


def test_a_call_that_no_thread_can_make_is_answered_at_once(model: FakeModel) -> None:
    transport = BackendTransport(model, 1, "test")
    transport.shut_down()
    request_id = transport.enqueue(ModelInput({}), time.monotonic() + LIMIT_S)
    (response,) = transport.responses(LIMIT_S)
    assert response.request_id == request_id and isinstance(response.error, Unavailable)


def test_step_is_answered_with_what_was_accepted(client: Any, model: FakeModel) -> None:
    answer = ask(client, step(PROMPT, [said(4), said(5), 1]))
    assert (answer.path, answer.next_token) == ((1, 2), said(6))
    assert model.calls[0]["request_output_len"] == [[4]] and model.calls[0]["input_ids"] == [PROMPT]
    assert client.status().num_calls == 1 and client.status().num_sequences == 1


def test_delta_is_joined_and_an_unknown_sequence_is_reported(client: Any, model: FakeModel) -> None:
    ask(client, step(PROMPT))
    ask(client, step([*PROMPT, 3, 8], start=4))
    assert model.calls[1]["input_ids"] == [[*PROMPT, 3, 8]]
    with pytest.raises(UnknownSequence):
        ask(client, step(PROMPT, sequence_id=2, start=2))


@pytest.mark.parametrize(("length", "sent"), [(4, 3), (17, 2), (18, 1), (19, 0)])
def test_chain_is_cut_to_the_engine_s_room(client: Any, model: FakeModel, length: int, sent: int) -> None:
    answer = ask(client, step([1] * length, [said(length), said(length + 1), said(length + 2), 1, 1]))
    assert len(model.calls[0].get("draft_input_ids", [[]])[0]) == sent == len(answer.path)


def test_context_that_fills_the_engine_is_refused(client: Any) -> None:
    with pytest.raises(EngineError, match="room for 20 tokens"):
        ask(client, step([1] * 20))


def test_tree_is_refused_by_name(client: Any) -> None:
    with pytest.raises(EngineError, match="has no trees that branch"):
        ask(client, step(PROMPT, TokenTree.from_paths([[1], [2]])))


def test_salt_is_refused_where_blocks_are_shared_and_only_there(client: Any, model: FakeModel) -> None:
    with pytest.raises(RequestError, match="cache_salt keeps the KV blocks of some requests from others"):
        ask(client, step(PROMPT, salt="mine"))
    with running(client_of(StepAdapter(BACKEND, False), model, 4, "test")) as unshared:
        assert ask(unshared, step(PROMPT, salt="mine")).next_token == said(4)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EngineError("Triton model 'x' failed: no"), "Triton model 'x' failed: no"),
        (ValueError("odd"), "answer was not understood: odd"),
    ],
)
def test_failed_call_is_an_error_of_that_call_alone(
    client: Any, model: FakeModel, error: Exception, words: str
) -> None:
    model.fails = error
    with pytest.raises(EngineError, match=words):
        ask(client, step(PROMPT))
    model.fails = None
    assert ask(client, step(PROMPT)).next_token == said(4)


def test_lost_model_is_lost_before_the_deadline(client: Any, model: FakeModel) -> None:
    model.fails = EngineLost("gone")
    with pytest.raises(EngineLost):
        ask(client, step(PROMPT))


def test_deadline_answers_and_stops_by_the_call_s_id(client: Any, model: FakeModel) -> None:
    model.go.clear()
    answers: SimpleQueue[Any] = SimpleQueue()
    client.submit(step(PROMPT), time.monotonic() + 0.1, answers.put)
    answer = answers.get(timeout=LIMIT_S)
    assert type(answer) is Unavailable and "the deadline passed" in str(answer)
    until(lambda: len(model.calls) == 2, "the second call")
    assert model.calls[1]["stop"] == [[True]] and model.ids[0] == model.ids[1]
    model.go.set()
    assert ask(client, step(PROMPT)).next_token == said(4) and model.ids[2] != model.ids[0]
    assert answers.empty()


def test_release_answers_and_stops_the_call_under_way(client: Any, model: FakeModel) -> None:
    model.go.clear()
    answers = submit(client, step(PROMPT, sequence_id=4))
    assert model.began.acquire(timeout=LIMIT_S)
    client.release(4)
    assert str(answers.get(timeout=LIMIT_S)) == "the sequence was released"
    until(lambda: any("stop" in call for call in model.calls), "the stop")
    model.go.set()
    until(lambda: client.status().num_sequences == 0, "the end of the sequence")
    assert ask(client, step(PROMPT, sequence_id=4)).next_token == said(4) and answers.empty()


def test_second_call_of_a_sequence_is_refused_while_the_first_is_under_way(client: Any, model: FakeModel) -> None:
    model.go.clear()
    first = submit(client, step(PROMPT))
    assert "has a call under way" in str(submit(client, step(PROMPT)).get(timeout=LIMIT_S))
    model.go.set()
    assert first.get(timeout=LIMIT_S).next_token == said(4)


def test_calls_of_several_are_under_way_together(client: Any, model: FakeModel) -> None:
    model.go.clear()
    answers = [submit(client, step(PROMPT, sequence_id=n)) for n in range(1, 5)]
    for _ in answers:
        assert model.began.acquire(timeout=LIMIT_S)
    model.go.set()
    assert [answer.get(timeout=LIMIT_S).next_token for answer in answers] == [said(4)] * 4


def test_call_that_waits_for_a_thread_is_answered_at_its_deadline_and_never_made(model: FakeModel) -> None:
    with running(client_of(StepAdapter(BACKEND, True), model, 1, "test")) as client:
        model.go.clear()
        first = submit(client, step(PROMPT))
        assert model.began.acquire(timeout=LIMIT_S)
        waiting: SimpleQueue[Any] = SimpleQueue()
        client.submit(step(PROMPT, sequence_id=2), time.monotonic() + 0.1, waiting.put)
        late = waiting.get(timeout=LIMIT_S)
        assert type(late) is Unavailable and "the deadline passed" in str(late)
        model.go.set()
        assert first.get(timeout=LIMIT_S).next_token == said(4)
        assert ask(client, step(PROMPT, sequence_id=2)).next_token == said(4)
        assert len(model.calls) == 2 and waiting.empty()


def test_threads_that_hang_keep_no_process_from_its_end(model: FakeModel) -> None:
    with running(client_of(StepAdapter(BACKEND, True), model, 1, "hanging")) as client:
        model.go.clear()
        submit(client, step(PROMPT))
        assert model.began.acquire(timeout=LIMIT_S)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("hanging"))
    model.go.set()


def test_close_answers_what_is_under_way(model: FakeModel) -> None:
    with running(client_of(StepAdapter(BACKEND, True), model, 4, "test")) as client:
        model.go.clear()
        answers = submit(client, step(PROMPT))
        assert model.began.acquire(timeout=LIMIT_S)
    assert str(answers.get(timeout=LIMIT_S)) == "the engine is shutting down"
    assert str(submit(client, step(PROMPT)).get(timeout=LIMIT_S)) == "the engine is shutting down"
    model.go.set()


def test_figures_are_reported(client: Any) -> None:
    reports: SimpleQueue[Any] = SimpleQueue()
    client.watch(reports.put)
    client.on_broken(lambda: None)
    assert client.preparation(step(PROMPT)) is None and reports.get(timeout=LIMIT_S).blocks_total == 0


# The draft model


def draft(length: int, context: int = 4, salt: str = "") -> DraftRequest:
    return DraftRequest(delta_of(Context([1] * context), 0, 9, salt), Sampling(0.7, seed=3), length, 8)


@pytest.mark.parametrize(("asked", "context", "drafted"), [(3, 4, 3), (20, 4, 8), (5, 18, 2), (5, 20, 0), (0, 4, 0)])
def test_draft_is_the_greedy_continuation_as_far_as_it_fits(
    model: FakeModel, asked: int, context: int, drafted: int
) -> None:
    with running(client_of(DraftAdapter(BACKEND, True), model, 4, "test")) as client:
        answer = ask(client, draft(asked, context))
    assert answer.tree.tokens.tolist() == [said(context + i) for i in range(drafted)] and answer.tree.is_chain
    assert len(model.calls) == bool(drafted)
    assert all(call["runtime_top_k"] == [[1]] and "draft_input_ids" not in call for call in model.calls)


@pytest.mark.parametrize("tensors", [draft_tensors(np.array(PROMPT, np.int32), 5, BACKEND), stop_tensors()])
def test_drafts_and_stops_are_in_the_backend_s_names_types_and_shapes(tensors: Any) -> None:
    for name, tensor in tensors.items():
        declared = INPUTS[name]
        assert tensor.dtype == DTYPES[declared["dtype"]] and tensor.shape[0] == 1 and tensor.size
        assert all(dim in (-1, size) for dim, size in zip(declared["dims"], tensor.shape[1:], strict=True)), name
    assert {name for name, declared in INPUTS.items() if not declared["optional"]} <= tensors.keys()


# The deployment


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


def config_of(folder: Path, **keys: Any) -> ServingConfig:
    return ServingConfig(**{"target": str(folder), "engine": "tensorrtllm_backend", **keys})


def test_models_of_both_are_called_by_their_names(checkpoint: Path, tmp_path: Path) -> None:
    target = make_engine(tmp_path / "target", checkpoint)
    drafter = make_engine(tmp_path / "draft", checkpoint, role="draft", mode="", max_draft_len=0)
    config = config_of(target, draft=str(drafter))
    called: list[str] = []
    for made in (build_target, build_draft):
        client, manifest = made(config, lambda model: called.append(model) or FakeModel())  # type: ignore[arg-type,func-returns-value]
        client.close()
        assert manifest.vocab_size == 64
    assert called == [*BACKEND_MODELS.values()]
    served = capabilities_of(config)
    assert served.max_nodes == 16 and not served.logprobs and "repetition_penalty" in served.lacks
    with pytest.raises(ConfigError, match="can only be called from within Triton"):
        build_target(config)


def test_prefix_sharing_cannot_be_off_where_the_backend_s_own_parameter_is_on(checkpoint: Path, tmp_path: Path) -> None:
    target = make_engine(tmp_path / "target", checkpoint)
    with pytest.raises(ConfigError, match="prefix_sharing must be true for the target, got false: NVIDIA's backend"):
        build_target(config_of(target, prefix_sharing=False), lambda model: FakeModel())


# Engines that draft by themselves


class CountingModel(FakeModel):
    """Says how many drafts it has accepted and made, or, where it is None, nothing."""

    counts: tuple[int, int] | None = (3, 8)

    def __call__(self, tensors: Any, outputs: Any, request_id: str, limit_s: float) -> dict[str, Any]:
        if "stop" in tensors:
            return super().__call__(tensors, outputs, request_id, limit_s)
        assert outputs == (*OUTPUTS, ACCEPTED, DRAFTED) and tensors["return_perf_metrics"].tolist() == [[True]]
        answer = super().__call__(tensors, OUTPUTS, request_id, limit_s)
        if self.counts:
            answer |= {
                name: np.array([[n]], np.int32) for name, n in zip((ACCEPTED, DRAFTED), self.counts, strict=True)
            }
        return answer


def inside_step(ids: list[int], inside: EngineSpeculation | None) -> StepRequest:
    return replace(step(ids), options=StepOptions(engine_speculation=inside))


@pytest.mark.parametrize(
    ("counts", "lengths", "drafted"),
    # The library counts drafted paths, we count a tree's nodes, and neither where it has not drafted.
    [((3, 8), (4, 1, 1), 2 * 63), (None, (1,) * 6, 0), ((99, 99), (5, 1), 63), ((-1, -1), (1,) * 6, 0)],
)
def test_burst_tells_the_passes_as_far_as_they_were_counted(
    counts: tuple[int, int] | None, lengths: tuple[int, ...], drafted: int
) -> None:
    model = CountingModel()
    model.counts = counts
    with running(client_of(EngineSideAdapter(BACKEND, True, "medusa", 63), model, 4, "test")) as client:
        answer = ask(client, inside_step(PROMPT, EngineSpeculation(6)))
    assert answer.tokens(TokenTree.bare()) == [said(4 + i) for i in range(6)]
    assert answer.engine_speculation == EngineSpeculationResult(
        "medusa", tuple(said(4 + i) for i in range(5)), lengths, drafted
    )


@pytest.mark.parametrize(
    ("inside", "context", "length"),
    [(EngineSpeculation(99), 4, 16), (EngineSpeculation(3), 4, 3), (None, 4, 1), (EngineSpeculation(9), 18, 2)],
)
def test_burst_is_as_long_as_there_is_room(inside: EngineSpeculation | None, context: int, length: int) -> None:
    model = CountingModel()
    with running(client_of(EngineSideAdapter(BACKEND, True, "medusa", 63), model, 4, "test")) as client:
        answer = ask(client, inside_step([1] * context, inside))
    assert model.calls[0]["request_output_len"] == [[length]]
    assert (answer.engine_speculation is None) == (inside is None) and len(answer.tokens(TokenTree.bare())) == length


def test_burst_has_sizes_and_no_choices() -> None:
    model = CountingModel()
    with running(client_of(EngineSideAdapter(BACKEND, True, "lookahead", 15, (4, 3, 4)), model, 4, "test")) as client:
        ask(client, inside_step(PROMPT, EngineSpeculation(4, sizes=(4, 3, 2))))
        for sizes in ((5, 3, 2), (4, 4, 2), (4, 3, 5), (1, 2, 1)):
            with pytest.raises(RequestError, match=r"must be in \(2, 2, 1\) to \(4, 3, 4\), for which the engine was"):
                ask(client, inside_step(PROMPT, EngineSpeculation(4, sizes=sizes)))
        with pytest.raises(RequestError, match="no tensor for choices"):
            ask(client, inside_step(PROMPT, EngineSpeculation(4, choices=((0,),))))
        with pytest.raises(EngineError, match="has no target tokens"):
            ask(
                client,
                replace(step(PROMPT), options=StepOptions(target_tokens=True, engine_speculation=EngineSpeculation(4))),
            )
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    assert [model.calls[0][name] for name in names] == [[[4]], [[3]], [[2]]]
    assert set(model.calls[0]) <= INPUTS.keys() and len(model.calls) == 1


@pytest.mark.parametrize(("mode", "method"), BUILD_MODES.items())
def test_engine_that_drafts_by_itself_has_bursts(checkpoint: Path, tmp_path: Path, mode: str, method: str) -> None:
    folder = make_engine(tmp_path / "target", checkpoint, mode=mode)
    client, _ = build_target(config_of(folder), lambda model: CountingModel())
    answer = ask(client, inside_step(PROMPT, EngineSpeculation(4)))
    client.close()
    assert answer.engine_speculation.method == method == capabilities_of(config_of(folder)).engine_method


def test_launcher_loads_the_backend_s_models_first_and_says_who_writes_them(checkpoint: Path, tmp_path: Path) -> None:
    target = make_engine(tmp_path / "target", checkpoint)
    config, models = config_of(target, draft=str(target)), tmp_path / "models"
    for name in ("target", "draft", "speculative", "tensorrt_llm"):
        (models / name).mkdir(parents=True)
        (models / name / "config.pbtxt").touch()
    with pytest.raises(
        ConfigError, match=r"no Triton model 'tensorrt_llm_draft' in .*build\.trtllm\.repository writes"
    ):
        models_to_load(config, models)
    assert models_to_load(config_of(target), models) == ["tensorrt_llm", "target", "speculative"]
