"""Tool calls of the demo's model through a real server and the gateway: the same under every method, streamed or not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import serving
from tests.support.gateway import running_gateway

pytestmark = pytest.mark.server

MODELS = Path(__file__).resolve().parents[2] / "models"
TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<tool_call>
{%- for m in messages %}{{ m.content }}
{% for call in m.tool_calls or [] %}{{ call.function | tojson }}
{% endfor %}{% endfor %}"""
SEVERAL = {"type": "array", "items": {"enum": ["Oslo", "Paris", "Rome"]}, "minItems": 4, "maxItems": 9}
PARAMETERS = {
    "type": "object",
    "properties": {"cities": SEVERAL},
    "required": ["cities"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "local_time")
]
METHODS = ("none", "prompt_lookup", "suffix", "draft_model", "eagle2")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("tools")
    heads = "\n".join(f'{name} = "{MODELS / name}"' for name in ("target", "draft", "eagle"))
    (folder / "serving.toml").write_text(f"{heads}\nkv_memory_mb = 64\n")
    (folder / "chat.jinja").write_text(TEMPLATE)
    with (
        serving(folder / "serving.toml") as server,
        running_gateway(server.grpc_url, MODELS / "target", chat_template=str(folder / "chat.jinja")) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0, timeout=120) as made,
    ):
        yield made


def calls_of(client: openai.OpenAI, streams: bool, messages: list[Any], **more: Any) -> tuple[Any, ...]:
    body: Any = {"model": "target", "messages": messages, "tools": TOOLS, "seed": 5, "max_tokens": 200, **more}
    if streams:
        with client.chat.completions.stream(**body) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**body).choices[0]
    calls = choice.message.tool_calls or []
    return (
        [(call.function.name, call.function.arguments) for call in calls],
        choice.message.content or None,
        choice.finish_reason,
    )


@pytest.mark.parametrize("response_format", [False, True], ids=["required", "with a response format"])
def test_the_loop_of_calls_is_the_same_under_every_method(client: openai.OpenAI, response_format: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    more: dict[str, Any] = {"response_format": form} if response_format else {"tool_choice": "required"}
    found = []
    for method in METHODS:
        for streams in (False, True):
            messages: list[Any] = [{"role": "user", "content": "def weather(cities):"}]
            turns = []
            for turn in range(2):
                calls, content, reason = calls_of(client, streams, messages, extra_body={"speculation": method}, **more)
                assert reason == ("tool_calls" if calls else "stop") and bool(calls) != bool(content)
                turns.append((calls, content))
                function = dict(zip(("name", "arguments"), calls[0], strict=True)) if calls else None
                called = {"tool_calls": [{"id": str(turn), "type": "function", "function": function}]} if calls else {}
                messages += [{"role": "assistant", "content": content, **called}]
                messages += [{"role": "tool", "tool_call_id": str(turn), "content": "rain"}] if calls else []
            found.append(turns)
    assert all(turns == found[0] for turns in found), found
    assert response_format or all(calls for calls, _ in found[0])
