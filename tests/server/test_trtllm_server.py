"""TensorRT-LLM's engines behind a real Triton server, over a stand-in for the library (tests/standin); no engine runs.

The texts are compared with those of the torch engine in float64 on a server of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher import Server, StartError
from launcher.probe import DIRECT
from tests.server.conftest import repository, serving
from tests.standin.engine_folder import BUILD_MODES, SPEC, make_engine, tree_of
from tests.support.clients import Answer, Stream, ask, generate, metric, until
from tests.support.executor_journal import ExecutorJournal

pytestmark = [pytest.mark.server, pytest.mark.long]

PROMPT = "the quick brown fox jumps over the lazy dog the quick"
NUM_TOKENS = 24
LONG: dict[str, Any] = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "end_id": -1}
ENDLESS: dict[str, Any] = {**LONG, "max_tokens": 150, "stream": True}
MAX_INPUT_LEN = 230
CHAINS: dict[str, dict[str, Any]] = {
    "none": {},
    "prompt_lookup": {},
    "ngram": {"num_draft_tokens": 2},
    "suffix": {"speculation_config": '{"tree": false}'},
    "predicted": {},
    "draft_model": {"num_draft_tokens": 3},
}


class Hosted(NamedTuple):
    """A server over engines, and the folder in which its executors log what they do."""

    server: Server
    folder: Path

    def journal(self) -> ExecutorJournal:
        """Return the events of the target's executor from now on."""
        return ExecutorJournal(self.folder, "target")

    def ask(self, **inputs: Any) -> Answer:
        """Send one request to `speculative`; return its answer."""
        return ask(self.server.grpc_url, **inputs)

    @property
    def num_sequences(self) -> float:
        """The sequences of the target, by the metrics, which are up to a second late."""
        return metric(self.server.metrics_url, "spec_sequences", model="target")


@contextmanager
def hosting(folder: Path, checkpoints: Path, *lines: str, stop_limit_s: int = 10, **options: Any) -> Iterator[Hosted]:
    """Serve a target's engine over the tiny target, and a draft model's engine for external drafts."""
    make_engine(folder / "target", checkpoints / "target", max_input_len=MAX_INPUT_LEN, **options)
    text = ['engine = "tensorrt_llm"', 'target = "target"', *lines]
    if not options.get("mode"):
        make_engine(folder / "draft", checkpoints / "draft", role="draft", mode="", max_draft_len=0)
        text += ['draft = "draft"', "draft_timeout_ms = 20000", "remember_tokens = 10000"]
    (folder / "serving.toml").write_text("\n".join(text))
    models = {"target": "standin.py"} | ({} if options.get("mode") else {"draft": "standin.py"})
    made = repository(folder, "speculative", "speculative_unary", **models)
    server_options = {"repository": made, "env": {"STANDIN_FOLDER": str(folder)}, "stop_limit_s": stop_limit_s}
    with serving(folder / "serving.toml", **server_options) as server:
        yield Hosted(server, folder)


@pytest.fixture(scope="module")
def external(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    with hosting(tmp_path_factory.mktemp("external"), checkpoints) as hosted:
        yield hosted


@pytest.fixture(scope="module", params=BUILD_MODES)
def inside(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Hosted, str]]:
    """A server over an engine that drafts by itself, and its method."""
    method = BUILD_MODES[request.param]
    line = f'default_speculation = "{method}"'
    with hosting(tmp_path_factory.mktemp(method), checkpoints, line, mode=request.param) as hosted:
        yield hosted, method


@pytest.fixture(scope="module")
def truth(server: Server) -> list[int]:
    """The text of the torch engine."""
    return ask(server.grpc_url, speculation="none", **LONG).ids


def drafting(method: str, truth: list[int]) -> dict[str, Any]:
    """Return the inputs that ask for a chain method; one token in six of a prediction is wrong."""
    wrong = {"draft_input_ids": [1 if i % 6 == 5 else token for i, token in enumerate(truth)]}
    return {"speculation": method, **CHAINS[method], **(wrong if method == "predicted" else {})}


# Chains of the server on an engine for external drafts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", CHAINS)
def test_chain_method_gives_the_torch_engine_s_text(
    external: Hosted, truth: list[int], method: str, stream: bool
) -> None:
    journal = external.journal()
    answer = external.ask(stream=stream, return_stats=True, **LONG, **drafting(method, truth))
    assert answer.ids == truth
    assert (answer.stats["method"], answer.stats["rule"], answer.last["rule"]) == (method, "engine", "engine")
    assert len(answer.parts) == (answer.last["num_steps"] if stream else 1)
    drafts = [event["drafts"] for event in journal.events("enqueued")]
    assert len(drafts) == answer.last["num_steps"]
    assert sum(drafts) == answer.last["total_draft_tokens"] and max(drafts) <= 16
    assert (sum(drafts) > 0) == (method != "none")
    if method == "predicted":
        assert answer.last["num_steps"] < NUM_TOKENS / 2
        assert answer.last["total_accepted_draft_tokens"] == NUM_TOKENS - answer.last["num_steps"]


def test_draft_model_is_asked_through_its_own_executor(external: Hosted, truth: list[int]) -> None:
    journal = ExecutorJournal(external.folder, "draft")
    answer = external.ask(return_stats=True, **LONG, **drafting("draft_model", truth))
    assert answer.stats["sources"]["draft_model"]["num_drafted"] == answer.last["total_draft_tokens"] > 0
    assert len(journal.ids("enqueued")) >= answer.last["num_steps"] - 1


def test_log_probabilities_are_the_torch_engine_s(external: Hosted, server: Server, truth: list[int]) -> None:
    asked = {**LONG, "return_log_probs": True}
    theirs = external.ask(**asked, **drafting("predicted", truth)).last["output_log_probs"]
    ours = ask(server.grpc_url, speculation="none", **asked).last["output_log_probs"]
    assert theirs == pytest.approx(ours, abs=1e-5)


def test_eight_requests_are_in_the_executor_together(external: Hosted, truth: list[int]) -> None:
    journal, methods = external.journal(), [*CHAINS, "none", "prompt_lookup"]
    with Stream(external.server.grpc_url) as stream:
        with journal.held():
            for number, method in enumerate(methods):
                stream.send(str(number), **LONG, **drafting(method, truth))
            journal.await_enqueued(len(methods))
            assert len(journal.under_way) == 8
        answers = stream.answers(*map(str, range(8)))
    assert [answer.ids for answer in answers.values()] == [truth] * 8
    assert journal.most_at_once == 8


def test_cancelled_stream_asks_the_executor_nothing_more(external: Hosted) -> None:
    journal = external.journal()
    with journal.held(), Stream(external.server.grpc_url) as stream:
        stream.send("r", **ENDLESS, speculation="none")
        journal.leave()
        assert stream.receive().values
        until(lambda: external.num_sequences == 1, "a sequence in the metrics")
        until(lambda: len(journal.ids("enqueued")) > 1, "the second step, which the executor holds")
        stream.cancel()
        until(lambda: not journal.leave() and external.num_sequences == 0, "the end of the cancelled request")
    until(lambda: not journal.under_way, "the executor's end of it")
    assert 1 < len(journal.ids("enqueued")) < ENDLESS["max_tokens"]


def test_deadline_cancels_what_the_executor_has(external: Hosted) -> None:
    journal = external.journal()
    with journal.held():
        answer = external.ask(timeout_ms=300, **LONG, speculation="none")
        assert answer.last["finish_reason"] == "deadline" and answer.ids == []
        until(lambda: journal.ids("cancelled"), "the cancellation at the executor")
    until(lambda: not journal.under_way, "the executor's end of it")
    assert journal.ids("cancelled") == journal.ids("enqueued")


@pytest.mark.parametrize("method", CHAINS)
def test_sampling_above_temperature_zero_says_that_a_seed_does_not_fix_the_text(
    external: Hosted, truth: list[int], method: str
) -> None:
    asked = {**LONG, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    answer = external.ask(return_stats=True, **asked, **drafting(method, truth))
    assert len(answer.ids) == NUM_TOKENS and answer.ids != truth
    assert answer.last["rule"] == answer.stats["rule"] == "engine (a seed does not fix the text)"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            {"speculation": "medusa"},
            "the method 'medusa': it keeps its hidden states to itself; engines built for medusa",
        ),
        (
            {"speculation": "eagle3"},
            "the method 'eagle3': it keeps its hidden states to itself; engine = 'torch' serves",
        ),
        ({"speculation": "lookahead"}, "'lookahead' with a window and guesses side by side: TensorRT-LLM's executor"),
        (
            {"speculation": "jacobi"},
            "the method 'jacobi', which learns from the target's tokens: TensorRT-LLM's executor",
        ),
        ({"speculation": "suffix"}, "the method 'suffix' with tree true: "),
        ({"speculation": "prompt_lookup", "speculation_config": '{"branches": 2}'}, "with branches above 1: "),
        (
            {"rule": "coupled"},
            "the rule 'coupled': TensorRT-LLM's executor samples by itself and verifies chains alone",
        ),
        ({"rule": "block"}, "its own: rejection, engine (input rule)"),
        ({"temperature": 1.0, "min_p": 0.1}, "min_p: it is not established in which order"),
        ({"presence_penalty": 0.5}, "presence_penalty: a step hands it the whole text as a prompt"),
        ({"guided_decoding_guide_type": "json"}, "guided_decoding_guide_type: "),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids: the executor has no such mask"),
    ],
    ids=str,
)
def test_what_the_engine_lacks_is_refused_with_the_reason(external: Hosted, inputs: dict[str, Any], words: str) -> None:
    answer = external.ask(**{**LONG, "end_id": 3, **inputs})
    assert answer.error.startswith("the target's engine does not serve ") and words in answer.error


def test_draft_logits_are_handed_to_the_engine(external: Hosted) -> None:
    """NVIDIA's clients ask for rejection with this flag; then the draft engine's q is sent with its tokens."""
    asked = {**LONG, "speculation": "draft_model", "temperature": 1.0, "seed": 3, "use_draft_logits": True}
    answer = external.ask(**asked)
    assert not answer.error and len(answer.ids) == NUM_TOKENS
    assert answer.last["total_draft_tokens"] > 0


def test_executor_s_own_rule_may_be_named_there_and_nowhere_else(
    external: Hosted, server: Server, truth: list[int]
) -> None:
    assert external.ask(rule="engine", **LONG).ids == truth
    assert (
        "the rule 'engine': it belongs to engines that sample by themselves"
        in ask(server.grpc_url, rule="engine", **LONG).error
    )


def test_prompt_beyond_the_engine_s_input_is_refused_naming_the_largest(external: Hosted) -> None:
    longest = [1 + i % 60 for i in range(MAX_INPUT_LEN)]
    assert len(external.ask(input_ids=longest, max_tokens=1, end_id=-1).ids) == 1
    assert "max_tokens must be in 1..1 after a prompt of 230" in external.ask(input_ids=longest, max_tokens=2).error
    assert f"has 231 tokens, at most {MAX_INPUT_LEN} allowed" in external.ask(input_ids=[*longest, 1]).error


# Engines that draft by themselves


def streamed_by_pass(hosted: Hosted, journal: ExecutorJournal, **inputs: Any) -> Answer:
    """Stream a request for which the executor runs one pass per response."""
    answer = Answer()
    with journal.held(), Stream(hosted.server.grpc_url) as stream:
        stream.send("r", **inputs, stream=True)
        while not (answer.responses and answer.responses[-1].final):
            journal.leave()
            answer.responses.append(stream.receive())
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_internal_method_gives_the_torch_engine_s_text_and_its_acceptance(
    inside: tuple[Hosted, str], truth: list[int], stream: bool
) -> None:
    hosted, method = inside
    journal = hosted.journal()
    asked_for = {**LONG, "return_stats": True, "speculation": method}
    answer = streamed_by_pass(hosted, journal, **asked_for) if stream else hosted.ask(**asked_for)
    last = answer.last
    assert answer.ids == truth
    (asked,) = journal.events("enqueued")  # one request for the whole text
    assert asked["max_tokens"] == NUM_TOKENS
    passes = [event for event in journal.events("pass") if asked["id"] in event["ids"]]
    assert last["num_steps"] == len(passes) < NUM_TOKENS
    assert last["total_accepted_draft_tokens"] == NUM_TOKENS - len(passes)
    assert last["total_draft_tokens"] == (15 if method == "lookahead" else 16) * (len(passes) - 1)
    assert list(answer.stats["sources"]) == [method] and answer.stats["rule"] == "engine"
    assert answer.stats["acceptance_length"] == pytest.approx(NUM_TOKENS / len(passes))
    if stream:
        assert [part["step_lengths"] for part in answer.parts] == [[len(part["output_ids"])] for part in answer.parts]
        assert len(answer.parts) == len(passes)
    else:
        assert len(last["step_lengths"]) == len(passes) and sum(last["step_lengths"]) == NUM_TOKENS


def test_internal_method_is_the_default_where_the_deployment_says_so(inside: tuple[Hosted, str]) -> None:
    hosted, method = inside
    assert hosted.ask(return_stats=True, **LONG).stats["method"] == method
    assert generate(hosted.server.http_url, LONG).body["num_steps"] < NUM_TOKENS


def test_none_is_one_token_a_pass_on_an_engine_that_drafts(inside: tuple[Hosted, str], truth: list[int]) -> None:
    answer = inside[0].ask(**LONG, speculation="none")
    assert answer.ids == truth
    assert (answer.last["num_steps"], answer.last["total_draft_tokens"]) == (NUM_TOKENS, 0)


def test_steps_of_an_internal_method_add_up_to_the_text(inside: tuple[Hosted, str], truth: list[int]) -> None:
    answer = inside[0].ask(**LONG, return_steps=True)
    told = json.loads(answer.last["steps"])
    said: list[int] = []
    for step in told["steps"]:
        assert step["prefix_len"] == len(told["prompt_ids"]) + len(said)
        assert step["path"] == step["node_ids"] == []
        said += [*step["extra"], step["next_token"]]
    assert said == truth


def test_eight_requests_of_an_internal_method_share_its_passes(inside: tuple[Hosted, str], truth: list[int]) -> None:
    hosted, method = inside
    journal = hosted.journal()
    with Stream(hosted.server.grpc_url) as stream:
        with journal.held():
            for number in range(8):
                stream.send(str(number), **LONG, speculation=method, cache_salt=str(number))
            journal.await_enqueued(8)
        answers = stream.answers(*map(str, range(8)))
    assert [answer.ids for answer in answers.values()] == [truth] * 8
    assert journal.most_at_once == 8


def test_cancelled_stream_cancels_the_executor_s_request(inside: tuple[Hosted, str]) -> None:
    hosted, method = inside
    journal = hosted.journal()
    with journal.held(), Stream(hosted.server.grpc_url) as stream:
        stream.send("r", **ENDLESS, speculation=method)
        journal.leave()
        assert stream.receive().values
        stream.cancel()
        until(lambda: not journal.leave() and journal.ids("cancelled"), "the cancellation at the executor")
    until(lambda: not journal.under_way, "the executor's end of it")
    assert journal.ids("cancelled") == journal.ids("enqueued")
    assert [event["reason"] for event in journal.events("ended")] == ["CANCELLED"]


def test_end_id_ends_the_executor_s_request(inside: tuple[Hosted, str], truth: list[int]) -> None:
    hosted, method = inside
    journal = hosted.journal()
    answer = hosted.ask(**{**ENDLESS, "end_id": truth[5]}, speculation=method)
    place = truth.index(truth[5])
    assert answer.ids == truth[: place + 1] and answer.last["finish_reason"] == "stop"
    until(lambda: journal.events("ended"), "the end at the executor")
    assert len(journal.events("pass")) < ENDLESS["max_tokens"]


def test_stop_word_inside_a_burst_cuts_it_and_ends_the_executor_s_request(
    inside: tuple[Hosted, str], server: Server, truth: list[int]
) -> None:
    hosted, method = inside
    whole = ask(server.grpc_url, speculation="none", **LONG)
    # A word that no token ends, so that only the text tells; after the first passes, inside one that brought several.
    word = whole.text[10:12]
    expected = ask(server.grpc_url, speculation="none", **{**LONG, "stop_words": [word]})
    journal = hosted.journal()
    answer = hosted.ask(**{**ENDLESS, "stop_words": [word]}, speculation=method, return_stats=True)
    assert answer.last["finish_reason"] == "stop" == expected.last["finish_reason"]
    assert (answer.text, answer.ids) == (expected.text, expected.ids) and word not in answer.text
    until(lambda: not journal.under_way, "the end at the executor")
    assert len(journal.events("pass")) < ENDLESS["max_tokens"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"speculation": "prompt_lookup"}, "the method 'prompt_lookup': it drafts by itself, with the method "),
        ({"temperature": 1.0}, "temperature: it is not established for engines that draft by themselves"),
        ({"return_log_probs": True}, "log-probabilities: it is not established for engines that draft"),
        ({"rule": "coupled"}, "the rule 'coupled': "),
    ],
    ids=str,
)
def test_what_an_engine_that_drafts_lacks_is_refused(
    inside: tuple[Hosted, str], inputs: dict[str, Any], words: str
) -> None:
    answer = inside[0].ask(**LONG, **inputs)
    assert answer.error.startswith("the target's engine does not serve ") and words in answer.error


def test_choices_are_per_request_where_the_executor_s_interface_has_them(
    inside: tuple[Hosted, str], truth: list[int]
) -> None:
    hosted, method = inside
    wishes = {
        "lookahead": ({"window": 2, "ngram": 2, "guesses": 1}, 2),
        "eagle": ({"choices": [[0, 0, 0, 0], [1]]}, 5),  # exactly eagle_layers levels
    }
    config, num_nodes = wishes.get(method, ({"choices": [[0]]}, 0))
    answer = hosted.ask(**LONG, speculation=method, speculation_config=json.dumps(config))
    if not num_nodes:
        assert f"unknown key of {method} 'choices'" in answer.error
        return
    assert answer.ids == truth
    assert answer.last["total_draft_tokens"] == num_nodes * (answer.last["num_steps"] - 1)


def test_eagle_deployed_for_sampling_serves_requests_and_probes_without_a_temperature(
    checkpoints: Path, tmp_path: Path
) -> None:
    plan = {"servers": {"target": {}}, "spec": SPEC | {"eagle_posterior": 0.2, "choices": json.dumps(tree_of(16))}}
    with hosting(tmp_path, checkpoints, 'default_speculation = "eagle"', mode="eagle", plan=plan) as hosted:
        answer = hosted.ask(**LONG, seed=7)
        assert len(answer.ids) == NUM_TOKENS and answer.last["rule"] == "typical (lossy)"
        assert "temperature 0: this engine is deployed for sampling" in hosted.ask(**LONG, temperature=0.0).error
        with DIRECT.open(f"{hosted.server.health_url}/token", timeout=60) as probed:
            assert probed.status == 200


def test_executor_that_dies_in_a_text_costs_time_and_no_text(
    checkpoints: Path, tmp_path: Path, truth: list[int]
) -> None:
    line = 'default_speculation = "medusa"'
    # A Triton that has lost a process waits for it until its exit time-out.
    with hosting(tmp_path, checkpoints, line, mode="medusa", stop_limit_s=2) as hosted:
        journal, answer = hosted.journal(), Answer()
        with Stream(hosted.server.grpc_url) as stream:
            with journal.held():
                stream.send("r", **LONG, stream=True)
                journal.leave()
                answer.responses.append(stream.receive())
                journal.break_down()
                until(lambda: len(journal.ids("enqueued")) > 1, "the new process's warm-up, which waits for a pass")
            answer.responses += stream.answers("r")["r"].responses
    assert answer.ids == truth
    asked = [event["max_tokens"] for event in journal.events("enqueued")]
    # The text, the new process's warm-up, the rest of the text.
    assert asked == [NUM_TOKENS, 8, NUM_TOKENS - len(answer.responses[0].values["output_ids"])]


def test_executor_that_dies_while_idle_is_healed_by_the_next_request(
    checkpoints: Path, tmp_path: Path, truth: list[int]
) -> None:
    line = 'default_speculation = "medusa"'
    with hosting(tmp_path, checkpoints, line, mode="medusa", stop_limit_s=2) as hosted:
        assert hosted.ask(**LONG).ids == truth
        journal = hosted.journal()
        journal.break_down()
        assert hosted.ask(**LONG).ids == truth
        # The new process's warm-up and the whole text.
        assert [event["max_tokens"] for event in journal.events("enqueued")] == [8, NUM_TOKENS]


def test_draft_length_beyond_the_engine_s_is_refused_naming_the_limit(external: Hosted) -> None:
    answer = external.ask(**LONG, speculation="prompt_lookup", num_draft_tokens=17)
    assert answer.error == "the target's engine takes at most 16 draft tokens a step, got 17 (input num_draft_tokens)"


def test_default_method_that_the_engine_lacks_is_refused_at_load(checkpoints: Path, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(StartError) as caught:
        stack.enter_context(hosting(tmp_path, checkpoints, 'default_speculation = "prompt_lookup"', mode="medusa"))
    assert "default_speculation: the target's engine does not serve the method 'prompt_lookup'" in str(caught.value)
