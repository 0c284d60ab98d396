"""The public models over every protocol, on real engines: one text whatever the method, and bad input is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from launcher.server import Server
from orchestrator.server.inputs import INPUTS
from tests.support.clients import (
    Answer,
    Response,
    Stream,
    Tensor,
    ask,
    ask_unary,
    generate,
    generate_stream,
    infer,
    listed,
    metric,
    settled,
    until,
)

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox jumps over the lazy dog the quick"
LONG: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 24, "end_id": -1}
SAMPLED: dict[str, Any] = {**LONG, "temperature": 0.8, "top_p": 0.95, "seed": 7}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "prompt_lookup": {"speculation_config": '{"max_ngram": 2, "draft_len": 5}'},
    "ngram": {"num_draft_tokens": 2},
    "suffix": {"speculation_config": '{"min_prob": 0.3}'},
    "lookahead": {"speculation_config": '{"window": 3, "ngram": 3, "guesses": 2}'},
    "jacobi": {"num_draft_tokens": 4},
    "recycling": {"speculation_config": '{"max_nodes": 24}'},
    "predicted": {"draft_text": PROMPT},
    "draft_model": {"num_draft_tokens": 3},
}


def method_inputs(number: int) -> dict[str, Any]:
    """Return the inputs that ask for a method; the methods take turns."""
    method = list(METHODS)[number % len(METHODS)]
    return {"speculation": method, **METHODS[method]}


@pytest.fixture(scope="module")
def truth(server: Server) -> dict[str, list[int]]:
    """The texts without drafts."""
    return {name: ask(server.grpc_url, speculation="none", **inputs).ids for name, inputs in TASKS.items()}


TASKS = {"greedy": LONG, "sampled": SAMPLED}


def test_the_two_texts_differ_or_these_tests_prove_little(truth: dict[str, list[int]]) -> None:
    assert len(truth["greedy"]) == len(truth["sampled"]) == 24
    assert truth["greedy"] != truth["sampled"]
    assert min(len(set(ids)) for ids in truth.values()) > 5


# Doors


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stream", [False, True])
def test_grpc_stream_any_method_gives_the_target_s_text(
    server: Server, truth: dict[str, list[int]], task: str, method: str, stream: bool
) -> None:
    answer = ask(
        server.grpc_url, speculation=method, stream=stream, return_stats=True, **TASKS[task], **METHODS[method]
    )
    assert answer.ids == truth[task]
    assert answer.last["finish_reason"] == "length" and answer.stats["method"] == method
    assert 1 < len(answer.parts) <= answer.last["num_steps"] if stream else len(answer.parts) == 1
    assert sum(part["num_output_tokens"] for part in answer.parts) == 24
    assert all(sum(part["step_lengths"]) == len(part["output_ids"]) for part in answer.parts)
    assert sum(len(part["step_lengths"]) for part in answer.parts) == answer.last["num_steps"]
    assert answer.last["num_input_tokens"] == len(PROMPT.replace(" ", ""))
    assert (answer.last["total_draft_tokens"] > 0) == (method != "none")


@pytest.mark.parametrize("method", METHODS)
def test_http_doors_and_the_unary_sibling_give_the_same_text(
    server: Server, truth: dict[str, list[int]], method: str
) -> None:
    inputs = {**SAMPLED, "speculation": method, **METHODS[method]}
    whole = generate(server.http_url, inputs)
    assert whole.status == 200 and whole.body["output_ids"] == truth["sampled"]
    events = generate_stream(server.http_url, inputs | {"stream": True})
    assert [token for event in events for token in listed(event["output_ids"])] == truth["sampled"]
    assert "".join(event["text_output"] for event in events) == whole.body["text_output"]
    assert ["finish_reason" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert ask_unary(server.grpc_url, **inputs)["output_ids"] == truth["sampled"]
    over_http = infer(server.http_url, **inputs)
    assert over_http.status == 200 and over_http.body["output_ids"] == truth["sampled"]
    assert generate(server.http_url, inputs, "speculative_unary").body["text_output"] == whole.body["text_output"]


def test_generate_needs_one_response_and_says_so_when_asked_to_stream(server: Server) -> None:
    answer = generate(server.http_url, LONG | {"stream": True})
    assert answer.status == 200 and "exactly 1 response" in answer.error  # Triton's words
    assert generate(server.http_url, LONG).error == ""


def test_decoupled_model_is_not_for_infer_nor_for_unary_grpc(server: Server) -> None:
    assert infer(server.http_url, "speculative", text_input="a").status == 501
    with pytest.raises(grpc.RpcError) as caught:
        ask_unary(server.grpc_url, "speculative", text_input="a")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "body",
    [
        {"text_input": "abc", "max_tokens": 5},
        {"text_input": ["abc"], "max_tokens": [5]},
        {"text_input": [["abc"]], "max_tokens": [[5]]},
        {"text_input": "abc", "parameters": {"max_tokens": 5, "bad_words": [""], "stop_words": [""]}, "stream": False},
        {"text_input": "abc", "max_tokens": 5, "stop_words": "", "bad_words": "", "top_p": 0.0, "top_k": 1},
        {"text_input": "abc", "parameters": {"max_tokens": 5, "speculation": "draft_model", "temperature": 0}},
        {"input_ids": [1, 2, 3], "max_tokens": 5},
        {"text_input": "abc", "max_tokens": 5, "timeout": 0, "priority": 0, "triton_x": 1},
        {"id": "mine", "text_input": "abc", "max_tokens": 5, "beam_width": 1, "length_penalty": 1.0, "pad_id": 3},
    ],
)
def test_generate_every_form_of_a_request_is_read_alike(server: Server, body: dict[str, Any]) -> None:
    plain = ask(server.grpc_url, text_input="abc", max_tokens=5)
    answer = generate(server.http_url, body)
    assert answer.status == 200, answer.error
    assert answer.body["output_ids"] == plain.ids and answer.body["text_output"] == plain.text
    assert answer.body.get("id") == body.get("id")


def test_grpc_request_parameters_are_read_as_inputs(server: Server) -> None:
    with_inputs = ask(server.grpc_url, **SAMPLED)
    parameters = {name: SAMPLED[name] for name in ("max_tokens", "end_id", "temperature", "top_p", "seed")}
    assert ask(server.grpc_url, text_input=PROMPT, parameters=parameters).ids == with_inputs.ids


def test_output_options(server: Server) -> None:
    plain = ask(server.grpc_url, text_input="abc", max_tokens=6, end_id=-1)
    repeated = ask(
        server.grpc_url, text_input="abc", max_tokens=6, end_id=-1, exclude_input_in_output=False, stream=True
    )
    assert repeated.text == "abc" + plain.text and repeated.ids == plain.ids
    assert "stats" not in plain.last and "output_log_probs" not in plain.last
    scored = ask(server.grpc_url, text_input="abc", max_tokens=6, end_id=-1, return_log_probs=True, stream=True)
    scores = [x for part in scored.parts for x in part["output_log_probs"]]
    assert len(scores) == 6 and max(scores) <= 0
    assert scored.last["cum_log_probs"] == pytest.approx(sum(scores), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_stop_words_and_ids_end_the_text_wherever_a_step_ends(server: Server, method: str) -> None:
    plain = ask(server.grpc_url, speculation="none", **LONG)
    word = plain.text[9:12]
    cut = ask(server.grpc_url, speculation=method, stop_words=["", word], stream=True, **LONG, **METHODS[method])
    assert cut.text == plain.text[: plain.text.index(word)] and cut.last["finish_reason"] == "stop"
    stop_id = plain.ids[7]
    cut = ask(server.grpc_url, speculation=method, stop_ids=[stop_id], stream=True, **LONG, **METHODS[method])
    assert cut.ids == plain.ids[: plain.ids.index(stop_id) + 1] and cut.last["finish_reason"] == "stop"


def test_max_nodes_of_a_request_bounds_its_trees(server: Server) -> None:
    answer = ask(
        server.grpc_url, speculation="draft_model", speculation_config='{"draft_len": 8, "max_nodes": 2}', **LONG
    )
    assert 0 < answer.last["total_draft_tokens"] <= 2 * answer.last["num_steps"]


def test_prompt_that_fills_the_context_gives_its_last_token(server: Server) -> None:
    for method, options in METHODS.items():
        answer = ask(server.grpc_url, text_input="a" * 511, speculation=method, **options)
        assert len(answer.ids) == 1 and answer.last["finish_reason"] in ("length", "stop")
    answer = ask(server.grpc_url, text_input="a" * 505, end_id=-1, speculation="prompt_lookup")
    assert len(answer.ids) == 7 and answer.last["finish_reason"] == "length"


# Many at once


def test_one_stream_carries_many_requests_told_apart_by_their_ids(server: Server) -> None:
    jobs = {
        f"job{number}": {
            "text_input": PROMPT[number:], "max_tokens": 12 + number % 5, "end_id": -1, "seed": number,
            "temperature": 0.8 * (number % 2), "stream": number % 3 > 0,
        }
        for number in range(18)
    }  # fmt: skip
    with Stream(server.grpc_url) as stream:
        for number, (name, inputs) in enumerate(jobs.items()):
            stream.send(name, **inputs, **method_inputs(number))
        answers = stream.answers(*jobs)
        assert stream.finish() == []
    for name, inputs in jobs.items():
        alone = ask(server.grpc_url, **inputs | {"speculation": "none"})
        assert answers[name].ids == alone.ids, name
        assert answers[name].text == alone.text


def test_many_doors_at_once_give_every_one_its_own_text(server: Server, truth: dict[str, list[int]]) -> None:
    def over_http(number: int) -> list[int]:
        body = {**TASKS[["greedy", "sampled"][number % 2]], **method_inputs(number)}
        answer = generate(server.http_url, body, ["speculative", "speculative_unary"][number % 2])
        assert answer.status == 200, answer.error
        return answer.body["output_ids"]

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(over_http, range(24))) == [truth["greedy"], truth["sampled"]] * 12


def test_request_that_was_cancelled_takes_no_further_step(server: Server) -> None:
    """Seen from outside: the target's count of steps stops, far below what the request would have needed."""

    def steps() -> float:
        return metric(server.metrics_url, "nv_inference_count", model="target")

    before = steps()
    with Stream(server.grpc_url) as stream:
        stream.send(text_input="a", max_tokens=500, end_id=-1, stream=True, speculation="none")
        for _ in range(3):
            stream.receive()
        stream.cancel()
    assert settled(steps, "the steps to end") - before < 500
    alone = ask(server.grpc_url, return_stats=True, **LONG)
    assert alone.stats["requests_per_pass"] == 1.0


@pytest.mark.parametrize(("method", "source"), [("suffix", "suffix.memory"), ("auto", "memory")])
def test_a_repeated_request_is_drafted_from_the_response_of_the_same_salt(
    server: Server, method: str, source: str
) -> None:
    def asked(salt: str) -> Answer:
        inputs = {"text_input": "xy", "max_tokens": 40, "end_id": -1, "speculation": method, "return_stats": True}
        return ask(server.grpc_url, stream=True, cache_salt=salt, **inputs)

    first, salt = asked(f"first of {method}"), f"second of {method}"
    other = asked(salt)
    assert source not in first.stats["sources"]
    assert source not in other.stats["sources"]
    again = until(
        lambda: (one := asked(salt)).stats["sources"].get(source, {}).get("num_accepted") and one, "the memory"
    )
    assert again.ids == first.ids == other.ids
    assert again.stats["sources"][source]["num_accepted"] > 20


# Bad input

SOUND = {"text_input": "abc", "max_tokens": 3}
#: Inputs, and the words of the refusal: what is wrong, its value, what is allowed.
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "empty prompt": ({"text_input": ""}, ["the prompt is empty", "at least one token"]),
    "max_tokens too large": ({"max_tokens": 510}, ["max_tokens must be in 1..509", "got 510", "3 tokens"]),
    "unknown method": (
        {"speculation": "promptlookup"},
        ["'promptlookup'", "mean 'prompt_lookup'", "draft_model, eagle, eagle2, eagle3, jacobi, lookahead"],
    ),
    "JSON of brackets": ({"speculation_config": "[" * 50_000}, ["speculation_config is not JSON"]),
    "unknown config key": (
        {"speculation": "draft_model", "speculation_config": '{"draft_length": 3}'},
        ["'draft_length'", "did you mean 'draft_len'", "max_nodes"],
    ),
    "temperature NaN": ({"temperature": float("nan")}, ["temperature must be a number in 0..100", "got nan"]),
    "prompt beyond the context": ({"text_input": "a" * 600}, ["600 tokens", "at most 511"]),
    "unsupported option": ({"beam_width": 4}, ["beam_width is not supported", "got 4", "allowed: 0, 1"]),
    "a rule for chains": ({"rule": "block", "speculation": "suffix"}, ["rule 'block'", "'suffix' has tree true"]),
    "a broken expression": (
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(a"},
        ["the guide is not a regex", "unclosed group", "guided_decoding_guide"],
    ),
}


def check_serves(server: Server) -> None:
    assert len(ask(server.grpc_url, end_id=-1, **SOUND).ids) == 3


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_over_every_door_and_the_next_request_served(server: Server, case: str) -> None:
    bad, words = BAD[case]
    inputs = {name: value for name, value in (SOUND | bad).items() if value is not None}
    answer = ask(server.grpc_url, **inputs)
    assert not answer.parts and answer.responses[-1].final
    said = answer.error
    assert all(word in said for word in words), said
    assert "\n" not in said and len(said) < 1500
    # NaN and inf are not JSON, but Python writes them and Triton reads them.
    assert generate(server.http_url, inputs) == (400, {"error": said})
    assert infer(server.http_url, **inputs).error == said or "nan" in said or "inf" in said
    with pytest.raises(grpc.RpcError) as caught:
        ask_unary(server.grpc_url, **inputs)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, said)
    check_serves(server)


@pytest.mark.parametrize(
    ("wrong", "right", "where"),
    [("tempature", "temperature", "beside"), ("maxtokens", "max_tokens", "in parameters")],
)
def test_misspelt_parameter_over_generate_is_refused_with_the_nearest(
    server: Server, wrong: str, right: str, where: str
) -> None:
    extra = {wrong: 1} if where == "beside" else {"parameters": {wrong: 1}}
    answer = generate(server.http_url, SOUND | extra)
    assert answer.status == 400
    assert f"unknown parameter {wrong!r}; did you mean {right!r}?" in answer.error
    assert all(name in answer.error for name in INPUTS)
    assert "unknown parameter" in ask(server.grpc_url, parameters={wrong: 1}, **SOUND).error
    check_serves(server)


@pytest.mark.parametrize(("name", "raw"), [("text_input", b"ab\xff"), ("cache_salt", b"\xed\xa0\x80")])
def test_invalid_utf8_is_refused(server: Server, name: str, raw: bytes) -> None:
    said = ask(server.grpc_url, **SOUND | {name: raw}).error
    assert f"{name} must be UTF-8, byte {raw.index(raw.strip(b'ab')[:1])} is not" in said
    body = json.dumps(SOUND | {name: "RAW"}).encode().replace(b"RAW", raw)
    assert generate(server.http_url, body) == (400, {"error": said})
    check_serves(server)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": Tensor("INT32", (1, 2), [3, 4])},
        {"max_tokens": Tensor("INT32", (1,), [3])},
        {"max_tokens": Tensor("FP32", (1, 1), [3.0])},
        {"max_tokens": Tensor("BOOL", (1, 1), [True])},
        {"text_input": Tensor("BYTES", (2, 1), ["a", "b"])},
        {"stop_ids": Tensor("INT32", (1, 1, 2), [3, 4])},
    ],
)
def test_wrong_shape_or_type_over_grpc_is_refused_in_triton_s_words(server: Server, wrong: dict[str, Tensor]) -> None:
    """Triton refuses before it calls the model, and then sends no FINAL flag."""
    with Stream(server.grpc_url) as stream:
        stream.send("bad", **SOUND | wrong)
        assert isinstance(refused := stream.receive(), Response) and refused.error and refused.id == "bad"
        stream.send("good", end_id=-1, **SOUND)
        assert len(stream.answers("good")["good"].ids) == 3


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"abc"', b'{"text_input": 3}', b'{"text_input": null}', b'{"text_input": "abc", "max_tokens": 1.5}',
        b'{"text_input": "abc", "max_tokens": true}', b'{"text_input": "abc", "temperature": "hot"}',
        b'{"text_input": "abc", "seed": -1}', b'{"text_input": "abc", "parameters": 3}', b'{"text_input": "\\ud800"}',
        b'{"text_input": ["abc", "abd"]}', b'{"text_input": "abc", "parameters": {"x": {"y": 1}}}', b"\xff" * 100,
        b'{"text_input": "abc", "max_tokens": ' + b"9" * 400 + b"}", b'{"text_input": "abc", "top_k": [[[1,2],[3]]]}',
    ],
)  # fmt: skip
def test_invalid_generate_body_is_refused_and_the_next_request_served(server: Server, body: bytes) -> None:
    answer = generate(server.http_url, body)
    assert answer.status in (400, 500) and answer.error
    check_serves(server)
