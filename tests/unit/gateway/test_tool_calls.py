"""Tool calls: the calls in a text however it is cut, and OpenAI's own client before the gateway and a scripted replica."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_calls import CallParser, kind_of
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.standin_replica import StandInReplica
from tests.unit.gateway.test_tokenizer import write

pytestmark = pytest.mark.unit

HERMES = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}
call as <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{%- endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{{ tools | tojson }} respond with {"name": function name, "parameters": dictionary}{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}{% endfor %}"""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]
OSLO, PARIS = '{"city": "Oslo </tool_call> \\" }"}', '{"city": "Paris",\n "n": [1.50, {"a": null}]}'
# Text of a model → content, calls. The arguments come as they were written.
HERMES_TEXTS = {
    f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>': (None, [("weather", OSLO)]),
    f'Let me see.\n\n<tool_call>\n{{"name":"weather","arguments":{PARIS}}}\n</tool_call>\n<tool_call>\n'
    f'{{"name": "time", "arguments": {{}}}}\n</tool_call>': ("Let me see.", [("weather", PARIS), ("time", "{}")]),
    '<tool_call>{"arguments": {"city": "Ö"}, "name": "time"}</tool_call> done': (" done", [("time", '{"city": "Ö"}')]),
    '<tool_call>{"name": "time", "arguments": "{\\"city\\": 1}"}</tool_call>': (None, [("time", '{"city": 1}')]),
    '<tool_call>{"name": "time", "arguments": {"city": oops}</tool_call>': (None, [("time", '{"city": oops}')]),
    '<tool_call>{"name": "time", "arguments": {"city": "Os': (None, [("time", '{"city": "Os')]),
    "<tool_call>no object</tool_call>": ("<tool_call>no object</tool_call>", []),
    "plain <tool text >  \n": ("plain <tool text >  \n", []),
    '{"name": "weather"} <tool_': ('{"name": "weather"} <tool_', []),
    "": ("", []),
}
LLAMA_TEXTS = {
    f'{{"name": "weather", "parameters": {OSLO}}}': (None, [("weather", OSLO)]),
    f'\n\n{{"name": "weather", "parameters": {PARIS}}}; {{"parameters": {{}}, "name": "time"}}': (
        None,
        [("weather", PARIS), ("time", "{}")],
    ),
    '{"type": "function", "name": "time", "parameters": {"city": "x"}}': (None, [("time", '{"city": "x"}')]),
    '{"name": "nobody", "parameters": {}}': ('{"name": "nobody", "parameters": {}}', []),
    '{"answer": [1, {"name": "time"}]}': ('{"answer": [1, {"name": "time"}]}', []),
    '{"answer": "' + "x" * 400: ('{"answer": "' + "x" * 400, []),
    'So: {"name": "time", "parameters": {}}': ('So: {"name": "time", "parameters": {}}', []),
    "": ("", []),
}
TEXTS = [(HERMES, text, wanted) for text, wanted in HERMES_TEXTS.items()]
TEXTS += [(LLAMA, text, wanted) for text, wanted in LLAMA_TEXTS.items()]


def joined(parser: CallParser, pieces: list[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """The content and the calls of a text that comes in pieces."""
    content, calls = "", dict[int, tuple[str, str]]()
    for index, piece in enumerate(pieces):
        delta = parser.push(piece, is_last=index == len(pieces) - 1)
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            name, arguments = calls.get(call["index"], ("", ""))
            more = call["function"]
            calls[call["index"]] = (name + more.get("name", ""), arguments + more["arguments"])
    return content if content or not calls else None, [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize(("template", "text", "wanted"), TEXTS)
def test_a_text_gives_the_same_calls_however_it_is_cut(template: str, text: str, wanted: Any) -> None:
    def parser() -> CallParser:
        return CallParser(frozenset({"weather", "time"}), is_bare=kind_of(template) == "llama3")

    assert joined(parser(), [text]) == joined(parser(), [*text, ""]) == wanted

    @settings(deadline=None, max_examples=30)
    @given(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    def cut(ends: list[int]) -> None:
        pieces = [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        assert joined(parser(), pieces) == wanted

    cut()


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = CallParser(frozenset(), is_bare=False)
    deltas = [parser.push(piece) for piece in ('<tool_call>{"name": "f", "arguments": ', '{"code": "a', "b", 'c"}}')]
    assert [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[1:]] == ['{"code": "a', "b", 'c"}']


def test_only_the_first_call_counts_if_there_may_be_one() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert joined(CallParser(frozenset(), is_bare=False, is_parallel=False), [text, "\n", text]) == (
        None,
        [("f", "{}")],
    )


# OpenAI's client → the gateway → a replica that says what it is told


@contextlib.contextmanager
def client_of(
    replica: StandInReplica, folder: Path, template: str, **more: Any
) -> Iterator[tuple[openai.OpenAI, RunningGateway]]:
    (folder / "chat").write_text(template)
    replica.requests.clear()
    with (
        running_gateway(replica.address, write(folder), chat_template=str(folder / "chat"), **more) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0, timeout=60) as client,
    ):
        yield client, gateway


def asked(client: openai.OpenAI, streams: bool, **more: Any) -> tuple[str | None, list[tuple[str, str]], str]:
    """Content, calls and reason, as OpenAI's own client puts a stream together."""
    body: Any = {"model": "", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, **more}
    if streams:
        with client.chat.completions.stream(**body) as stream:
            done = stream.get_final_completion()
    else:
        done = client.chat.completions.create(**body)
    message = done.choices[0].message
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) and all(call.type == "function" for call in calls)
    found = [(call.function.name, call.function.arguments) for call in calls]
    return message.content or None, found, done.choices[0].finish_reason


@pytest.fixture
def scripted(replica: StandInReplica) -> Iterator[StandInReplica]:
    yield replica
    replica.script = []


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama3"])
def test_openais_client_gets_the_calls(scripted: StandInReplica, tmp_path: Path, template: str, streams: bool) -> None:
    texts = HERMES_TEXTS if template == HERMES else LLAMA_TEXTS
    with client_of(scripted, tmp_path, template) as (client, _):
        for text, (content, calls) in texts.items():
            scripted.script = [text[at : at + 3] for at in range(0, len(text), 3)] or [""]
            wanted = (content or None, calls, "tool_calls" if calls else "stop")
            assert asked(client, streams) == wanted
            assert asked(client, streams, tool_choice="none") == (text or None, [], "stop")
    prompt = bytes(scripted.requests[0]["input_ids"]).decode("latin-1")
    assert "guided_decoding_guide" not in scripted.requests[0] and prompt


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama3"])
def test_a_call_that_must_be_made_is_an_object_by_grammar(
    scripted: StandInReplica, tmp_path: Path, template: str, streams: bool
) -> None:
    key = "arguments" if template == HERMES else "parameters"
    scripted.script = ['{"name": "time", "', f'{key}": {{"city": "x', '"}}']
    named: Any = {"type": "function", "function": {"name": "time"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    with client_of(scripted, tmp_path, template) as (client, _):
        for choice, names in (("required", ["weather", "time"]), (named, ["time"]), (allowed, ["time"])):
            assert asked(client, streams, tool_choice=choice) == (None, [("time", '{"city": "x"}')], "tool_calls")
            (guide,) = scripted.requests[-1]["guided_decoding_guide"]
            schemas = json.loads(guide)["anyOf"]
            assert [schema["properties"]["name"]["const"] for schema in schemas] == names
            assert schemas[0]["properties"][key] == TOOLS[0]["function"]["parameters"]


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
def test_a_response_format_holds_for_a_text_that_is_no_call(
    scripted: StandInReplica, tmp_path: Path, streams: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with client_of(scripted, tmp_path, HERMES) as (client, _):
        for text, content, calls in (
            ('{"n": 1}', '{"n": 1}', []),
            ('{"name": "time", "arguments": {}}', None, [("time", "{}")]),
        ):
            scripted.script = [*text]
            assert asked(client, streams, response_format=wanted)[:2] == (content, calls)
        (guide,) = scripted.requests[-1]["guided_decoding_guide"]
    assert json.loads(guide)["anyOf"][-1] == schema and len(json.loads(guide)["anyOf"]) == 3


def test_a_loop_of_calls_comes_back_to_the_template_as_objects(scripted: StandInReplica, tmp_path: Path) -> None:
    scripted.script = ["It", " rains."]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages: list[Any] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    with client_of(scripted, tmp_path, HERMES) as (client, gateway):
        assert asked(client, False, messages=messages) == ("It rains.", [], "stop")
        prompt = gateway.state.checkpoint.decode(scripted.requests[-1]["input_ids"])
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in prompt
    assert json.dumps(TOOLS[0]) in prompt, "as the client wrote it"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x', which tools does not have",
        ),
        ({"tools": TOOLS, "response_format": {"type": "regex", "regex": "a"}}, "response_format", "regex"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(
    replica: StandInReplica, tmp_path: Path, body: dict[str, Any], param: str, words: str
) -> None:
    with client_of(replica, tmp_path, HERMES) as (_, gateway):
        answer = gateway.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}], **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.json()
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "parser", "status"),
    [
        ("{{ messages[0].content }}", "hermes", 400),
        ("{{ tools }}", "auto", 400),
        ("{{ tools }}", "llama3", 200),
    ],
)
def test_a_template_must_show_tools_and_how_they_are_called(
    replica: StandInReplica, tmp_path: Path, template: str, parser: str, status: int
) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "max_tokens": 2}
    with client_of(replica, tmp_path, template, tool_parser=parser) as (_, gateway):
        assert gateway.post("/v1/chat/completions", body).status_code == status
