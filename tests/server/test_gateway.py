"""The gateway in front of a real server, as OpenAI's own client sees it, and as a client that makes errors."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from launcher import Server
from tests.support.clients import ask, metric, until
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.server

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
GREEDY = {
    "model": "target",
    "prompt": "abcabcabc",
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def gateway(server: Server, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with running_gateway(
        server.grpc_url, checkpoints / "target", chat_template=str(template), max_body_bytes=100_000, max_sequences=4
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0, timeout=60) as made:
        yield made


def direct(server: Server, **inputs):
    """Return the server's own answer, which a completion should equal."""
    answer = ask(server.grpc_url, ignore_eos=True, stream=True, **inputs)
    assert not answer.error, answer.error
    return answer


# What comes back


def test_completion_is_the_servers_text(client: openai.OpenAI, server: Server) -> None:
    done = client.completions.create(**GREEDY)

    wanted = direct(server, text_input="abcabcabc", max_tokens=24)
    assert done.choices[0].text == wanted.text and done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (9, 24, 33)
    assert done.object == "text_completion" and done.model == "target" and done.id.startswith("cmpl-")


def test_stream_joined_is_the_completion_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **GREEDY))

    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    # How many tokens were drafted may differ, because `auto` decides by measured times.
    without_drafts = {"completion_tokens_details"}
    last, usage = chunks[-1], whole.usage
    assert last.choices == [] and last.usage and usage
    assert last.usage.model_dump(exclude=without_drafts) == usage.model_dump(exclude=without_drafts)
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1


def test_chunks_of_a_stream_have_the_usage_so_far_if_that_is_wanted(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(stream=True, stream_options=options, **GREEDY))

    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and 0 < counts[0] <= counts[-1] == 24
    assert [chunk.usage.prompt_tokens for chunk in chunks[-2:]] == [9, 9]  # known when the text has ended
    assert all(c.usage.total_tokens == c.usage.prompt_tokens + c.usage.completion_tokens for c in chunks)


def test_async_client_streams_several_requests_at_once(gateway: RunningGateway, client: openai.OpenAI) -> None:
    async def text(made: openai.AsyncOpenAI, seed: int) -> str:
        request = {**GREEDY, "temperature": 1.0, "seed": seed}
        return "".join([c.choices[0].text async for c in await made.completions.create(stream=True, **request)])

    async def all_texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0) as made:
            return await asyncio.gather(*(text(made, seed) for seed in range(6)))

    texts = asyncio.run(all_texts())
    assert texts == [
        client.completions.create(**{**GREEDY, "temperature": 1.0, "seed": s}).choices[0].text for s in range(6)
    ]
    assert len(set(texts)) == 6


def test_chat_goes_through_the_template(client: openai.OpenAI, server: Server) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    done = client.chat.completions.create(
        model="target", messages=messages, temperature=0, max_completion_tokens=8, extra_body={"ignore_eos": True}
    )

    assert done.choices[0].message.content == direct(server, text_input="sbeuhia", max_tokens=8).text
    assert done.choices[0].message.role == "assistant" and done.usage.prompt_tokens == 7


def test_chat_stream_names_the_role_once(client: openai.OpenAI) -> None:
    request = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(stream=True, **request))

    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices[0].delta.role] == ["assistant"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_choices_are_those_of_the_server(client: openai.OpenAI, server: Server) -> None:
    done = client.completions.create(**{**GREEDY, "n": 3, "seed": 4, "temperature": 1.0, "max_tokens": 6})

    answer = direct(server, text_input="abcabcabc", max_tokens=6, seed=4, temperature=1.0, num_return_sequences=3)
    texts = ["".join(p["text_output"] for p in answer.parts if p["sequence_index"] == i) for i in range(3)]
    assert [choice.text for choice in done.choices] == texts and len(set(texts)) == 3
    assert done.usage.prompt_tokens == 9 and done.usage.completion_tokens == 18


def test_several_prompts_as_text_and_as_ids(client: openai.OpenAI) -> None:
    texts = client.completions.create(**{**GREEDY, "prompt": ["abc", "xyz"]})
    ids = client.completions.create(**{**GREEDY, "prompt": [[1, 2, 3], [24, 25, 26]]})

    assert [choice.index for choice in texts.choices] == [0, 1]
    assert [choice.text for choice in texts.choices] == [choice.text for choice in ids.choices]
    assert texts.usage.prompt_tokens == 6


def test_completion_logprobs(client: openai.OpenAI, server: Server) -> None:
    found = client.completions.create(**{**GREEDY, "logprobs": 2, "max_tokens": 5}).choices[0]

    wanted = direct(server, text_input="abcabcabc", max_tokens=5, return_log_probs=True)
    values = [value for part in wanted.parts for value in part["output_log_probs"]]
    shown = ["" if token == "<|endoftext|>" else token for token in found.logprobs.tokens]
    assert found.logprobs.token_logprobs == values and "".join(shown) == found.text and len(found.text) >= 3
    assert found.logprobs.text_offset == [len("".join(shown[:index])) for index in range(5)]
    assert all(
        max(top.values()) == top[token]
        for top, token in zip(found.logprobs.top_logprobs, found.logprobs.tokens, strict=True)
    )


def test_chat_logprobs_have_bytes_and_alternatives(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )

    content = done.choices[0].logprobs.content
    assert len(content) == done.usage.completion_tokens
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob


def test_speculation_figures_of_a_request(client: openai.OpenAI, server: Server) -> None:
    done = client.completions.create(
        **{**GREEDY, "max_tokens": 60, "extra_body": {"ignore_eos": True, "speculation": "prompt_lookup"}}
    )

    figures = done.model_extra["metrics"]["speculative_decoding"]
    stats = direct(server, text_input="abcabcabc", max_tokens=60, speculation="prompt_lookup", return_stats=True).stats
    assert figures["num_spec_steps"] == stats["num_steps"] == sum(figures["acceptance_histogram"])
    assert figures["num_draft_tokens"] == stats["sources"]["prompt_lookup"]["num_drafted"]
    accepted = sum(k * count for k, count in enumerate(figures["acceptance_histogram"]))
    assert figures["num_accepted_draft_tokens"] == accepted == stats["sources"]["prompt_lookup"]["num_accepted"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / stats["num_steps"])
    assert figures["draft_acceptance_rate"] == pytest.approx(stats["draft_acceptance_rate"])


def test_steps_on_demand_rebuild_the_tokens(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "speculation": "suffix", "return_steps": True, "return_token_ids": True}
    chunks = list(client.completions.create(**{**GREEDY, "extra_body": extra}, stream=True))

    for choice in (chunk.choices[0] for chunk in chunks):
        steps = choice.model_extra["steps"]
        tokens = [token["id"] for step in steps for token in step["tokens"]]
        assert tokens[: len(choice.token_ids)] == choice.token_ids
        assert all(
            step["nodes"][node - 1]["id"] == token["id"]
            for step in steps
            for node, token in zip(step["path"], step["tokens"], strict=False)
        )


# What a request may ask for


def test_stop_echo_and_prediction(client: openai.OpenAI) -> None:
    text = client.completions.create(**GREEDY).choices[0].text
    stopped = client.completions.create(**GREEDY, stop=[text[5:8]])
    assert stopped.choices[0].text == text[: text.index(text[5:8])] and stopped.choices[0].finish_reason == "stop"
    assert client.completions.create(**GREEDY, echo=True).choices[0].text == "abcabcabc" + text

    extra = {"ignore_eos": True, "prediction": {"type": "content", "content": text}}
    predicted = client.completions.create(**{**GREEDY, "extra_body": extra})
    assert predicted.choices[0].text == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0  # as many as paid


def test_penalties_bias_and_seed_reach_the_server(client: openai.OpenAI, server: Server) -> None:
    done = client.completions.create(
        **{**GREEDY, "temperature": 0.8},
        seed=11,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={"5": 2.0},
        top_p=0.9,
    )

    inputs = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias_ids": [5], "logit_bias_weights": [2.0]}
    wanted = direct(server, text_input="abcabcabc", max_tokens=24, temperature=0.8, seed=11, top_p=0.9, **inputs)
    assert done.choices[0].text == wanted.text


def test_schema_and_regex_shape_the_text(client: openai.OpenAI) -> None:
    form = {"type": "regex", "regex": "[ab]{4}c"}
    done = client.completions.create(model="target", prompt="x", max_tokens=10, extra_body={"response_format": form})
    assert (
        len(done.choices[0].text) == 5
        and set(done.choices[0].text[:4]) <= {"a", "b"}
        and done.choices[0].text[4] == "c"
    )

    digits = {
        "type": "json_schema",
        "json_schema": {"name": "digit", "schema": {"type": "integer", "minimum": 3, "maximum": 5}},
    }
    done = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": "x"}], max_tokens=10, response_format=digits
    )
    assert json.loads(done.choices[0].message.content) in (3, 4, 5)


def test_habitual_fields_are_accepted(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": "hi", "name": "me"}],
        max_tokens=2,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
    )

    assert done.choices[0].finish_reason in ("stop", "length")


def test_models_tokenize_and_detokenize(client: openai.OpenAI, gateway: RunningGateway) -> None:
    assert [model.id for model in client.models.list()] == ["target"]
    assert client.models.retrieve("target").object == "model"
    assert gateway.post("/tokenize", {"prompt": "abc"}).json() == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [1, 2, 3],
        "token_strs": None,
    }
    assert gateway.post("/tokenize", {"messages": [{"role": "user", "content": "b"}]}).json()["tokens"] == [21, 2, 1]
    assert gateway.post("/detokenize", {"tokens": [3, 2, 1]}).json() == {"prompt": "cba"}


# Errors


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
        ({"max_tokens": 3_000_000_000}, 400, "max_tokens", "2147483647"),
        ({"max_tokens": 100_000}, 400, "max_tokens", "after a prompt of 9 tokens"),
        ({"temperature": -1}, 400, "temperature", "0..100"),
        ({"temperature": "hot"}, 400, "temperature", "'hot'"),
        ({"stop": 5}, 400, "stop", "a string or a list of strings"),
        ({"prompt": []}, 400, "prompt", "empty"),
        ({"prompt": [1, "a"]}, 400, "prompt", "one kind"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "token ids"),
        ({"logit_bias": {"999": 1}}, 400, "logit_bias", "0..63"),
        ({"n": 5}, 400, "n", "at most 4"),
        ({"speculation": "eagl"}, 400, "speculation", "did you mean 'eagle'"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
        ({"model": "gpt"}, 404, "model", "available: target"),
        ({"suffix": "x"}, 400, "suffix", "not supported"),
        ({"prompt": "a" * 100_000}, 413, None, "100000"),
    ],
)
def test_errors_name_what_is_wrong(
    gateway: RunningGateway, change: dict, status: int, param: str | None, words: str
) -> None:
    answer = gateway.post("/v1/completions", {"model": "target", "prompt": "abcabcabc", "max_tokens": 4} | change)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert words in error["message"] and error["type"] == "invalid_request_error" and error["code"]


def test_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(**{**GREEDY, "max_tokens": 0}, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**GREEDY, "model": "other"})


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'"x"', b"[" * 50_000])
def test_bodies_that_are_no_object(gateway: RunningGateway, body: bytes) -> None:
    answer = httpx.post(f"{gateway.url}/v1/completions", content=body, headers=JSON, timeout=30)

    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods(gateway: RunningGateway) -> None:
    assert gateway.get("/v1/nothing").json()["error"]["code"] == "unknown_url"
    assert gateway.get("/v1/completions").status_code == 405


def test_keys_are_checked(server: Server, checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    with running_gateway(server.grpc_url, checkpoints / "target", api_keys_file=str(tmp_path / "keys")) as gateway:
        for key in ("first", "second"):
            assert openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key).models.list().data
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="third", max_retries=0).models.list()
        assert gateway.post("/v1/completions", {}).status_code == 401
        assert gateway.get("/health").status_code == gateway.get("/").status_code == 200
        assert gateway.get("/metrics").status_code == 401
        text = gateway.get("/metrics", headers={"Authorization": "Bearer first"}).text
        counts = [line for line in text.splitlines() if line.startswith("spec_gateway_requests_total")]
        assert sum(float(line.rpartition(" ")[2]) for line in counts) == 4


def test_no_replica_is_503_with_retry_after(checkpoints: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with running_gateway(address, checkpoints / "target", waits=False, recovery_limit_s=0.5) as gateway:
            answer = gateway.post("/v1/completions", {"prompt": "a"})
            assert gateway.get("/ready").status_code == 503 and gateway.get("/health").status_code == 200
    assert (
        answer.status_code == 503 and answer.headers["Retry-After"] and answer.json()["error"]["code"] == "unavailable"
    )


def running_sequences(server: Server) -> float:
    return metric(server.metrics_url, "spec_sequences", model="target")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(gateway: RunningGateway, server: Server, stream: bool) -> None:
    """Within a few attempts: on a busy machine a text may end before the server notices that its client left."""
    until(lambda: running_sequences(server) == 0, "an idle server")
    assert any(num_tokens_of_abandoned(gateway, stream) < 490 for _ in range(5))
    until(lambda: running_sequences(server) == 0, "the end of the sequence")


def num_tokens_of_abandoned(gateway: RunningGateway, stream: bool) -> float:
    """Leave a request of 490 tokens as soon as the first ones have come; return how many were generated."""
    body = {"prompt": "abcabcabc", "max_tokens": 490, "ignore_eos": True, "stream": stream, "speculation": "none"}
    body["presence_penalty"] = 0.1  # each step is then decided in Python, which gives the text some time
    before = gateway.metric("spec_gateway_generation_tokens_total")
    with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2])), timeout=30) as connection:
        raw = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        until(lambda: gateway.metric("spec_gateway_generation_tokens_total") > before, "the first token")
    until(lambda: gateway.metric("spec_gateway_requests_running") == 0, "the end of the request")
    return gateway.metric("spec_gateway_generation_tokens_total") - before


def test_metrics_count_what_was_served(gateway: RunningGateway, client: openai.OpenAI) -> None:
    before = gateway.metric("spec_gateway_generation_tokens_total")
    client.completions.create(**GREEDY)

    assert gateway.metric("spec_gateway_generation_tokens_total") == before + 24
    assert gateway.metric("spec_gateway_replica_ready") == 1
    assert gateway.metric('spec_gateway_requests_total{endpoint="/v1/completions",status="200"}') > 0
