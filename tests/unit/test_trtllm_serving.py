"""Engines of TensorRT-LLM behind the target's contract, over a stand-in for the library: no engine is run here."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from build.trtllm.manifest import write_manifest
from orchestrator.capabilities import Capabilities, capabilities_of, executor_capabilities
from orchestrator.config import ServingConfig
from orchestrator.context import Context
from orchestrator.engine_manifest import CHECKPOINT, read_manifest, served_checkpoint
from orchestrator.errors import (
    ConfigError,
    EngineError,
    EngineLost,
    RequestError,
    ServingError,
    Unavailable,
    UnknownSequence,
)
from orchestrator.loop import Limits
from orchestrator.methods import Materials, plan
from orchestrator.proposers.memory import Memory
from orchestrator.sampling import log_softmax
from orchestrator.tree import TokenTree
from orchestrator.types import Budget, Drafted, Edits, Grammar, Rule, Sampling, Want
from orchestrator.wire import DraftRequest, StepRequest, delta_of
from runtime.trtllm.build import build_draft, build_target, open_target
from runtime.trtllm.line import ExecutorLine
from tests.standin import FOLDER
from tests.standin.engine_folder import IMAGE, make_engine
from tests.support.decode import decode
from tests.support.engines import EngineTarget, PlainModel, ask, make_paged, start_target, submit
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_target

PROMPT = [5, 9, 5, 9, 12, 7, 5, 9]
NUM_TOKENS = 32
LIMITS = Limits(NUM_TOKENS, 200, 64)
LIMIT_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """Put the stand-in where the package would be, and take it away again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def greedy(checkpoint: Path) -> list[int]:
    """The text of our own engine."""
    engine = start_target(make_paged(checkpoint))
    text, _ = decode(EngineTarget(engine, 1), proposer_of("none"), PROMPT, Sampling(), LIMITS)
    engine.close()
    return text


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine(tmp_path_factory.mktemp("engines") / "target", checkpoint)


@pytest.fixture
def line(folder: Path) -> Iterator[ExecutorLine[StepRequest]]:
    with serving(folder) as engine:
        yield engine


class serving:  # noqa: N801
    """A target's line for the length of a with statement."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.line, self.manifest = open_target(config_of(folder, **keys))

    def __enter__(self) -> ExecutorLine[StepRequest]:
        return self.line

    def __exit__(self, *error: object) -> None:
        self.line.close()


def config_of(folder: Path, **keys: Any) -> ServingConfig:
    return ServingConfig(**{"target": str(folder), "engine": "tensorrt_llm", **keys})


def standin(line: ExecutorLine[Any]) -> Any:
    """The stand-in executor behind a line, for its knobs."""
    return line._executor


class ScriptedLine:
    """A draft model that knows the text, and is wrong about every fifth token of it."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def propose(self, context: Context, sampling: Sampling, budget: Budget) -> Drafted:
        start = len(context.output)
        chain = self.text[start : start + budget.max_nodes]
        return Drafted(
            TokenTree.chain([(t + 1) % VOCAB_SIZE if (start + i) % 5 == 4 else t for i, t in enumerate(chain)])
        )

    def close(self) -> None:
        pass


def proposer_of(method: str, parameters: dict[str, Any] | None = None, text: list[int] | None = None) -> Any:
    memory = Memory(1000)
    memory.learn("", text or [])
    chosen = plan(method, json.dumps(parameters or {}), frozenset({"draft"}), {})
    return chosen.proposer(
        Materials(
            lines=lambda name: ScriptedLine(text or []),
            vocab_size=VOCAB_SIZE,
            prediction=tuple(text or []),
            memory=memory.of(""),
        )
    )


def request(
    ids: list[int],
    drafts: list[int] | TokenTree = [],  # noqa: B006
    sampling: Sampling = Sampling(),  # noqa: B008
    want: Want = Want(),  # noqa: B008
    sequence_id: int = 1,
    prompt_len: int | None = None,
) -> StepRequest:
    context = Context(ids[:prompt_len])
    context.commit(ids[len(context) :])
    tree = drafts if isinstance(drafts, TokenTree) else TokenTree.chain(drafts)
    return StepRequest(delta_of(context, 0, sequence_id, ""), tree, sampling, want, 60_000)


# Every chain method: the target's own text


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
    line: ExecutorLine[StepRequest], greedy: list[int], method: str, parameters: dict[str, Any]
) -> None:
    proposer = proposer_of(method, parameters, greedy)
    text, progress = decode(EngineTarget(line, 7), proposer, PROMPT, Sampling(), LIMITS)
    assert text == greedy
    if method == "none":
        assert progress.tally.num_steps == NUM_TOKENS
    else:
        assert progress.tally.num_accepted_tokens > 0 and progress.tally.num_steps < NUM_TOKENS
    if method == "draft_model":  # wrong about one in five: no draft is accepted beyond it
        assert progress.tally.num_accepted_tokens <= 4 * NUM_TOKENS / 5


def test_stateless_steps_give_the_same_text(line: ExecutorLine[StepRequest], greedy: list[int]) -> None:
    text, _ = decode(EngineTarget(line, 7, stateless=True), proposer_of("prompt_lookup"), PROMPT, Sampling(), LIMITS)
    assert text == greedy


def test_eight_at_once_share_iterations_and_keep_their_own_texts(folder: Path, checkpoint: Path) -> None:
    limits = Limits(12, 200, 64)
    prompts = [[n + 1, n + 2, n + 1, n + 2, 3] for n in range(8)]
    engine = start_target(make_paged(checkpoint))
    expected = [decode(EngineTarget(engine, 1), proposer_of("none"), p, Sampling(), limits)[0] for p in prompts]
    engine.close()
    texts: dict[int, list[int]] = {}

    def run(number: int) -> None:
        target = EngineTarget(line, number + 1)
        texts[number], _ = decode(target, proposer_of("prompt_lookup"), prompts[number], Sampling(), limits)
        target.release()

    with serving(folder) as line:
        enqueued = standin(line).num_enqueued
        standin(line).gate.clear()
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        with standin(line)._changed:
            assert standin(line)._changed.wait_for(lambda: standin(line).num_enqueued == enqueued + 8, LIMIT_S)
        standin(line).gate.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert standin(line).most_at_once == 8
        assert line.status().num_sequences == 0 and line.status().num_jobs >= 8
    assert [texts[number] for number in range(8)] == expected


# Sampling


def test_draws_of_the_executor_have_the_target_s_law_whatever_is_drafted(
    line: ExecutorLine[StepRequest], checkpoint: Path
) -> None:
    """900 first tokens against p; the executor's random numbers are its own, so the seeds must be what varies."""
    rows = PlainModel(checkpoint).logits(PROMPT)
    p = np.exp(log_softmax(rows[None] / 2.0))[0]
    drafts = [[], [int(p.argmax())], [1]]
    counts = np.zeros(VOCAB_SIZE)
    for seed in range(900):
        sampling = Sampling(2.0, seed=seed)
        answer = ask(line, request(PROMPT, drafts[seed % 3], sampling))
        first = drafts[seed % 3][0] if answer.path else answer.next_token
        counts[first] += 1
    expected = 900 * p
    large = expected >= 5
    observed = [*counts[large], counts[~large].sum()]
    wanted = [*expected[large], expected[~large].sum()]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, wanted, strict=True) if e)
    assert statistic < len(wanted) + 5 * np.sqrt(2 * len(wanted))


def test_steps_of_one_request_have_seeds_of_their_own(line: ExecutorLine[StepRequest]) -> None:
    seeds = []
    executor = standin(line)
    enqueue = executor.enqueue_request
    executor.enqueue_request = lambda asked: seeds.append(asked.sampling_config.seed) or enqueue(asked)
    sampling = Sampling(1.0, seed=3)
    decode(EngineTarget(line, 1), proposer_of("none"), PROMPT, sampling, Limits(6, 200, 8))
    assert len(set(seeds)) == 6
    first = list(seeds)
    decode(EngineTarget(line, 2), proposer_of("none"), PROMPT, sampling, Limits(6, 200, 8))
    assert seeds[6:] == first


def test_edited_logits_go_undrafted_and_are_obeyed(line: ExecutorLine[StepRequest], greedy: list[int]) -> None:
    first = greedy[0]
    for edits in (Edits(bias=((first, -1000.0),)), Edits(bad_words=((first,),))):
        answer = ask(line, request(PROMPT, greedy[:3], Sampling(edits=edits)))
        assert answer.path == () and answer.next_token != first
    penalised = ask(line, request(PROMPT, greedy[:3], Sampling(repetition_penalty=1.3)))
    assert penalised.path == ()


def test_end_is_held_back_until_min_tokens_and_no_longer(line: ExecutorLine[StepRequest], greedy: list[int]) -> None:
    sampling = Sampling(min_tokens=2, edits=Edits(end_ids=(greedy[0],)))
    held = ask(line, request(PROMPT, greedy[:3], sampling))
    assert held.path == () and held.next_token != greedy[0]
    free = ask(line, request(PROMPT, greedy[:3], replace(sampling, min_tokens=0)))
    assert free.path[:1] == (1,)


def test_logprobs_are_the_model_s_own(line: ExecutorLine[StepRequest], checkpoint: Path, greedy: list[int]) -> None:
    drafts = [*greedy[:2], (greedy[2] + 1) % VOCAB_SIZE]
    answer = ask(line, request(PROMPT, drafts, want=Want(logprobs=True, num_top=3)))
    assert answer.path == (1, 2) and answer.next_token == greedy[2]
    plain = PlainModel(checkpoint)
    rows = np.stack([plain.logits(PROMPT + greedy[:n]) for n in range(3)])
    expected = log_softmax(rows)
    np.testing.assert_allclose(answer.logprobs, expected[range(3), greedy[:3]], atol=1e-5)
    assert answer.top_ids.tolist() == np.argsort(-rows, axis=-1)[:, :3].tolist()
    np.testing.assert_allclose(answer.top_logprobs, -np.sort(-expected, axis=-1)[:, :3], atol=1e-5)


# The life of a call


def test_step_with_a_delta_that_nobody_knows_is_unknown(line: ExecutorLine[StepRequest]) -> None:
    context = Context(PROMPT)
    delta = delta_of(context, 4, 9, "")
    with pytest.raises(UnknownSequence):
        ask(line, StepRequest(delta, TokenTree.bare(), Sampling(), Want(), 1000))


def test_deadline_cancels_the_request_and_answers_in_time(line: ExecutorLine[StepRequest]) -> None:
    standin(line).gate.clear()
    answers: SimpleQueue[Any] = SimpleQueue()
    began_s = time.monotonic()
    line.submit(request(PROMPT), began_s + 0.1, answers.put)
    answer = answers.get(timeout=LIMIT_S)
    assert isinstance(answer, Unavailable) and "deadline" in str(answer)
    assert time.monotonic() >= began_s + 0.1
    assert len(standin(line).cancelled) == 1
    standin(line).gate.set()
    assert ask(line, request(PROMPT)).path == ()
    assert answers.empty()


def test_release_cancels_the_call_under_way(line: ExecutorLine[StepRequest]) -> None:
    standin(line).gate.clear()
    answers = submit(line, request(PROMPT, sequence_id=4))
    line.release(4)
    assert str(answers.get(timeout=LIMIT_S)) == "the sequence was released"
    assert len(standin(line).cancelled) == 1
    assert line.status().num_sequences == 0


def test_second_call_of_a_sequence_is_refused_while_the_first_is_under_way(line: ExecutorLine[StepRequest]) -> None:
    standin(line).gate.clear()
    first = submit(line, request(PROMPT))
    assert "has a call under way" in str(submit(line, request(PROMPT)).get(timeout=LIMIT_S))
    standin(line).gate.set()
    assert not isinstance(first.get(timeout=LIMIT_S), ServingError)


def test_response_with_an_error_is_that_request_s_alone(line: ExecutorLine[StepRequest], greedy: list[int]) -> None:
    standin(line).gate.clear()
    standin(line).poison = 50
    poisoned = submit(line, request([50, 3], sequence_id=2))
    sound = submit(line, request(PROMPT, sequence_id=3))
    standin(line).gate.set()
    error = poisoned.get(timeout=LIMIT_S)
    assert type(error) is EngineError and str(error).startswith("TensorRT-LLM failed on this request: poisoned")
    assert sound.get(timeout=LIMIT_S).next_token == greedy[0]


def test_request_that_the_executor_refuses_is_an_error_of_its_own(
    line: ExecutorLine[StepRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standin(line).engine, "max_draft_len", 1)
    with pytest.raises(EngineError, match="request refused: Number of draft tokens \\(2\\) larger than maximum"):
        ask(line, request(PROMPT, [1, 2]))
    assert ask(line, request(PROMPT)).path == ()


def lie(line: ExecutorLine[StepRequest], output: list[int]) -> None:
    """Let the executor answer these tokens."""
    iterate = standin(line)._iterate

    def lying(active: Any) -> Any:
        response = iterate(active)
        response.result.output_token_ids[0] = list(output)
        return response

    standin(line)._iterate = lying


@pytest.mark.parametrize(
    ("output", "words"),
    [([], "ended the request without a token"), ([1, 2], "are not the 8"), (PROMPT, "are not the 8")],
)
def test_result_without_new_tokens_is_an_error(line: ExecutorLine[StepRequest], output: list[int], words: str) -> None:
    lie(line, output)
    with pytest.raises(EngineError, match=words):
        ask(line, request(PROMPT))


@pytest.mark.parametrize(
    ("new", "path", "next_token"),
    [
        ([21, 22], (1,), 22),  # cut short: the last token is the new root, though it was drafted
        ([21, 22, 23], (1, 2), 23),
        ([21, 30, 31], (1,), 30),  # went on behind the first difference: the rest is another step's
        ([30], (), 30),
    ],
)
def test_accepted_drafts_are_inferred_from_the_tokens(
    line: ExecutorLine[StepRequest], new: list[int], path: tuple[int, ...], next_token: int
) -> None:
    lie(line, PROMPT + new)
    answer = ask(line, request(PROMPT, [21, 22, 23]))
    assert (answer.path, answer.next_token) == (path, next_token)


def test_broken_executor_is_lost_and_says_so_once_all_are_answered(folder: Path) -> None:
    told: SimpleQueue[Any] = SimpleQueue()
    with serving(folder) as line:
        line.on_broken(lambda: told.put("broken"))
        standin(line).gate.clear()
        line.submit(request(PROMPT), time.monotonic() + LIMIT_S, told.put)
        standin(line).break_down()
        assert type(told.get(timeout=LIMIT_S)) is EngineLost
        assert told.get(timeout=LIMIT_S) == "broken"
        assert isinstance(submit(line, request(PROMPT)).get(timeout=LIMIT_S), EngineLost)
        line.on_broken(lambda: told.put("broken before"))
        assert told.get_nowait() == "broken before"


def test_close_answers_what_is_under_way(folder: Path) -> None:
    with serving(folder) as line:
        standin(line).gate.clear()
        answers = submit(line, request(PROMPT))
    assert str(answers.get(timeout=LIMIT_S)) == "the engine is shutting down"
    assert isinstance(submit(line, request(PROMPT)).get(timeout=LIMIT_S), Unavailable)


def test_watch_reports_figures(line: ExecutorLine[StepRequest]) -> None:
    reports: SimpleQueue[Any] = SimpleQueue()
    line.watch(reports.put)
    assert line.preparation(request(PROMPT)) is None
    ask(line, request(PROMPT))
    assert reports.get(timeout=LIMIT_S).blocks_total == 0


# What is refused, and why


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            {"drafts": TokenTree.from_paths([[1], [2]])},
            "the step with siblings in its tree: TensorRT-LLM's executor sam",
        ),
        ({"sampling": Sampling(rule=Rule.REJECTION)}, "rule 'rejection': TensorRT-LLM's executor samples by itself"),
        ({"sampling": Sampling(rule=Rule.BLOCK)}, "rule 'block'"),
        ({"sampling": Sampling(rule=Rule.TYPICAL)}, "rule 'typical'"),
        ({"want": Want(picks=True)}, "which learns from the target's picks"),
        ({"want": Want(features_from=0)}, "which drafts from hidden states"),
        ({"sampling": Sampling(1.0, typical_p=0.5)}, "typical_p: the executor has no such rule"),
        ({"sampling": Sampling(1.0, min_p=0.1)}, "min_p: no argument of the executor is known for it"),
        ({"sampling": Sampling(presence_penalty=1.0)}, "presence_penalty: a step hands it the whole text as a prompt"),
        ({"sampling": Sampling(frequency_penalty=1.0)}, "frequency_penalty: a step hands it"),
        ({"sampling": Sampling(edits=Edits(allowed=(1,)))}, "allowed_token_ids: the executor has no such mask"),
        ({"sampling": Sampling(edits=Edits(grammar=Grammar("json", "")))}, "guided_decoding_guide_type: a step hands"),
        ({"sampling": Sampling(edits=Edits(bad_words=((1, 2),)))}, "bad_words of several tokens"),
        ({"sampling": Sampling(min_tokens=1, edits=Edits(end_ids=(1, 2)))}, "min_tokens with several end ids"),
    ],
)
def test_option_that_the_executor_lacks_is_refused_with_the_reason(
    line: ExecutorLine[StepRequest], step: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(line, request(PROMPT, **step))
    assert str(caught.value).startswith("the target's engine does not serve ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_context_beyond_the_engine_is_refused_with_its_length(line: ExecutorLine[StepRequest]) -> None:
    with pytest.raises(RequestError, match="has 256 tokens, the engine was built for at most 255"):
        ask(line, request([1] * 256))
    assert ask(line, request([1] * 255, [1] * 20)).next_token >= 0


def test_capabilities_say_which_methods_an_engine_serves(folder: Path, tmp_path: Path) -> None:
    external = capabilities_of(config_of(folder))
    plain = executor_capabilities(replace(read_manifest(folder), mode=""))
    medusa = executor_capabilities(replace(read_manifest(folder), mode="medusa"))
    asked = Sampling(), Want()
    assert external.refusal(*asked, method="suffix") == ""
    assert "method 'suffix' with tree true" in external.refusal(*asked, method="suffix", branches="tree true")
    assert plain.refusal(*asked, method="none") == ""
    assert plain.refusal(*asked, method="suffix").endswith("it was built for no drafts (input speculation)")
    assert medusa.refusal(*asked, method="medusa") == medusa.refusal(*asked, method="none") == ""
    assert "drafts by itself, with the method 'medusa'" in medusa.refusal(*asked, method="suffix")
    assert "temperature: it is not established" in medusa.refusal(Sampling(1.0), Want(), method="none")
    assert Capabilities().refusal(Sampling(1.0, min_p=0.1, rule=Rule.BLOCK), Want(picks=True), method="jacobi") == ""
    assert capabilities_of(ServingConfig(target=str(tmp_path))) == Capabilities()


def test_salts_share_no_blocks(line: ExecutorLine[StepRequest]) -> None:
    salts, executor = [], standin(line)
    enqueue = executor.enqueue_request
    executor.enqueue_request = lambda asked: salts.append(asked.cache_salt_id) or enqueue(asked)
    for salt in ("", "a", "b", "a"):
        ask(line, StepRequest(delta_of(Context(PROMPT), 0, 1, salt), TokenTree.bare(), Sampling(), Want(), 1000))
    assert salts[0] is None and salts[1] == salts[3] and len(set(salts)) == 3


# Loading


def test_missing_library_names_the_container(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ConfigError, match="needs the package tensorrt_llm: run the server in the container") as caught:
        build_target(config_of(folder))
    assert IMAGE in str(caught.value)


def test_library_without_engines_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_llm

    monkeypatch.setattr(tensorrt_llm, "__version__", "1.3.0")
    with pytest.raises(ConfigError, match=r"TensorRT-LLM 1\.3\.0 cannot serve compiled engines"):
        build_target(config_of(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trtllm_version": "1.1.0"}, "was made by TensorRT-LLM 1.2.1, its engine.json says 1.1.0"),
        ({"role": "draft"}, "was built as draft, not as target"),
        ({"num_ranks": 2}, "lacks rank1.engine"),
    ],
)
def test_wrong_manifest_is_refused(checkpoint: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint)
    write_manifest(folder, replace(read_manifest(folder), **change))
    with pytest.raises(ConfigError, match=words):
        build_target(config_of(folder))


def test_engine_for_several_gpus_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint, num_ranks=2)
    (folder / "rank1.engine").touch()
    with pytest.raises(ConfigError, match="is for 2 GPUs; this version loads engines of one GPU"):
        build_target(config_of(folder))


def test_engine_that_the_library_cannot_load_is_refused_in_its_words(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint, mode="lookahead_decoding", max_draft_len=3, plan=SIZES)
    with pytest.raises(ConfigError, match=r"cannot load the engine .* needs more than max_draft_len"):
        open_target(config_of(folder))


def test_draft_engine_with_another_vocabulary_is_refused(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    draft = make_engine(tmp_path / "draft", checkpoint, role="draft", mode="", max_draft_len=0, vocab_size=99)
    with pytest.raises(ConfigError, match="has 99 tokens in its vocabulary"):
        build_target(config_of(folder, draft=str(draft)))


def test_served_checkpoint_is_what_the_engine_was_made_from(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    served = served_checkpoint(config_of(folder))
    assert (served.vocab_size, served.max_positions) == (VOCAB_SIZE, 256)
    assert served.tokenizer_file == str(folder / CHECKPOINT / "tokenizer.json")
    assert served_checkpoint(ServingConfig(target=str(checkpoint))).max_positions == 512
    other = make_engine(tmp_path / "engine", checkpoint, vocab_size=99)
    with pytest.raises(ConfigError, match="has 99 tokens in its vocabulary"):
        served_checkpoint(config_of(other))


# The draft model's engine


def test_draft_engine_proposes_its_greedy_chain(folder: Path, draft_checkpoint: Path, tmp_path: Path) -> None:
    draft = make_engine(tmp_path / "draft", draft_checkpoint, role="draft", mode="", max_draft_len=0)
    engine, manifest = build_draft(config_of(folder, draft=str(draft)))
    assert manifest.vocab_size == VOCAB_SIZE
    plain = PlainModel(draft_checkpoint)
    expected = list(PROMPT)
    for _ in range(3):
        expected.append(int(plain.logits(expected).argmax()))
    for sampling in (Sampling(), Sampling(1.0, seed=5)):
        drafted = ask(engine, DraftRequest(delta_of(Context(PROMPT), 0, 3, "salt"), sampling, 3, 8))
        assert drafted.tree.tokens.tolist() == expected[-3:] and drafted.tree.is_chain
    full = Context([1] * 256)
    assert ask(engine, DraftRequest(delta_of(full, 0, 4, ""), Sampling(), 3, 3)).tree.num_nodes == 0
    engine.close()


# Engines that draft by themselves

SIZES = {"spec": {"lookahead_window": 4, "lookahead_ngram": 3, "lookahead_guesses": 4}}


@pytest.mark.parametrize("mode", ["medusa", "eagle", "explicit_draft_tokens", "lookahead_decoding"])
def test_engine_that_drafts_by_itself_gives_the_same_text_in_bursts(
    checkpoint: Path, tmp_path: Path, greedy: list[int], mode: str
) -> None:
    folder = make_engine(tmp_path / "engine", checkpoint, mode=mode, plan=SIZES)
    with pytest.raises(ConfigError, match=r"drafts by itself, with the method .* the server cannot hand on yet"):
        build_target(config_of(folder))
    with serving(folder) as line:
        text, progress = decode(EngineTarget(line, 2), proposer_of("none"), PROMPT, Sampling(), LIMITS)
        burst = ask(line, request(PROMPT))
        with pytest.raises(RequestError, match="temperature: it is not established"):
            ask(line, request(PROMPT, sampling=Sampling(1.0)))
    assert text == greedy
    assert progress.tally.num_steps == 2
    assert [*burst.extra, burst.next_token] == greedy[:16]
    assert 1 < burst.num_iterations < 16
