"""Bodies: every value that no server could take is refused with its field, and null means that a field is absent."""

import json
from typing import Any

import openai.types.chat.completion_create_params as chat
import openai.types.completion_create_params as completion
import pytest
from pydantic import ValidationError

from gateway.errors import BadRequest, UnknownField
from gateway.fields import IGNORED, REFUSED, ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from gateway.parsing import MAX_DEPTH, MAX_KEYS, MAX_PARTS, parse
from gateway.triton import to_request
from gateway.values import Fields
from orchestrator.core.declarations import MAX_JSON_DEPTH, json_object
from orchestrator.core.errors import RequestError

pytestmark = pytest.mark.unit

TOO_WIDE = 2**31
HALF = "\ud800"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 3_000_000_000}, "max_tokens"),
        ({"min_tokens": -TOO_WIDE - 1}, "min_tokens"),
        ({"top_k": 10**12}, "top_k"),
        ({"num_draft_tokens": TOO_WIDE}, "num_draft_tokens"),
        ({"priority": 10**400}, "priority"),
        ({"timeout_ms": 10**400}, "timeout_ms"),
        ({"temperature": 10**400}, "temperature"),
        ({"n": 10**400}, "n"),
        ({"stop_token_ids": [TOO_WIDE]}, "stop_token_ids.0"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"logit_bias": {str(TOO_WIDE): 1}}, "logit_bias"),
        ({"prompt": [TOO_WIDE]}, "prompt"),
        ({"prompt": [[1], [1, TOO_WIDE]]}, "prompt"),
        ({"prompt": HALF}, "prompt"),
        ({"stop": ["a", HALF]}, "stop"),
        ({"speculation_config": {HALF: 1}}, "speculation_config"),
        ({"cache_salt": HALF}, "cache_salt"),
        ({HALF: 1}, "?"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ],
)
def test_what_no_server_could_take_is_refused_with_its_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(CompletionFields, json.dumps({"prompt": "a", **body}).encode()).inputs()
    assert refused.value.param == param
    str(refused.value).encode()  # the response can be written


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": TOO_WIDE - 1, "top_k": -1, "temperature": 1e300, "seed": -5},
        {"stop_token_ids": [TOO_WIDE - 1], "logit_bias": {"7": 1e300}},
        {"prompt": [TOO_WIDE - 1]},
        {"skip_special_tokens": True, "include_stop_str_in_output": False},
    ],
)
def test_what_a_server_may_judge_reaches_it(body: dict[str, Any]) -> None:
    assert to_request(parse(CompletionFields, json.dumps({"prompt": "a", **body}).encode()).inputs()).inputs


def test_null_is_absence_at_every_depth_but_within_a_schema() -> None:
    schema = {"enum": [None, 1], "default": None}
    form = {"type": "json_schema", "regex": None, "json_schema": {"name": "x", "strict": None, "schema": schema}}
    options = {"include_usage": None}
    found = parse(
        CompletionFields,
        json.dumps(
            {"prompt": "a", "n": None, "stream_options": options, "response_format": form, "verbosity": None}
        ).encode(),
    )

    assert (found.n, found.stream_options.include_usage) == (1, False)
    assert found.response_format.json_schema and found.response_format.json_schema.schema_ == schema


def test_habits_of_chat_clients_are_accepted() -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "tool_calls": None}
    for tools in (None, []):
        body = {"messages": [message], "tools": tools, "tool_choice": "none", "reasoning_effort": "low"}
        found = parse(ChatFields, json.dumps(body).encode())
        assert found.messages[0].for_template() == {"role": "user", "content": [part]}


@pytest.mark.parametrize(
    ("model", "openai_fields"),
    [(ChatFields, chat.CompletionCreateParamsBase), (CompletionFields, completion.CompletionCreateParamsBase)],
)
def test_each_field_of_openai_is_served_ignored_or_refused_by_name(model: Any, openai_fields: Any) -> None:
    needed = {**CHAT, "prompt": "a"}
    body = {name: needed[name] for name in needed if name in model.model_fields}
    names = set(openai_fields.__annotations__) | {"stream"}
    assert names - set(REFUSED) <= set(model.model_fields)
    for name in IGNORED:
        assert parse(model, json.dumps({**body, name: "x"}).encode()).ignored == (name,)
    for name in REFUSED:
        with pytest.raises(UnknownField, match=f"^({name}|web search) is "):
            parse(model, json.dumps({**body, name: "x"}).encode())


@pytest.mark.parametrize("name", ["metadata", "speculation_config", "response_format", "unheard_of"])
@pytest.mark.parametrize("levels", [MAX_DEPTH, 900])
def test_a_field_that_is_nested_too_deeply_is_refused(name: str, levels: int) -> None:
    body = f'{{"prompt": "a", "{name}": {"[" * levels}{"]" * levels}}}'
    with pytest.raises(BadRequest, match=f"{name}' is nested more than {MAX_DEPTH} levels deep"):
        parse(CompletionFields, body.encode())


def test_the_deepest_field_that_is_allowed_is_read() -> None:
    levels = MAX_DEPTH - 1
    body = f'{{"prompt": "a", "metadata": {"[" * levels}{"]" * levels}}}'
    assert parse(CompletionFields, body.encode()).prompt == "a"


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("model", "body", "wrong"),
    [
        (CompletionFields, {}, "prompt"),
        (CompletionFields, {"prompt": "a"}, "stop"),
        (CompletionFields, {"prompt": "a"}, "stop_token_ids"),
        (CompletionFields, {"prompt": "a"}, "allowed_token_ids"),
        (CompletionFields, {"prompt": "a"}, "bad_words"),
        (ChatFields, {}, "messages"),
        (ChatFields, CHAT, "modalities"),
        (ChatFields, CHAT, "tools"),
        (TokenizeFields, {}, "messages"),
        (DetokenizeFields, {}, "tokens"),
    ],
)
def test_a_list_of_wrong_items_is_a_few_errors(model: type[Fields], body: dict[str, Any], wrong: str) -> None:
    for items in ([{}] * 1000, [[{}] * 1000] * 3):
        with pytest.raises(ValidationError) as refused:
            model.model_validate({**body, wrong: items})
        assert refused.value.error_count() <= 6
        with pytest.raises(BadRequest) as named:
            parse(model, json.dumps({**body, wrong: items}).encode())
        assert named.value.param.split(".")[0] == wrong


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatFields, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (CompletionFields, {"prompt": "a", "prediction": {"type": "content", "content": [1] * 1000}}),
        (CompletionFields, {"prompt": [[1], [""] * 1000]}),
    ],
)
def test_a_list_of_wrong_items_within_a_field_is_a_few_errors(model: type[Fields], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= 6


@pytest.mark.parametrize("name", ["logit_bias", "stream_options", "metadata"])
def test_an_object_of_too_many_keys_is_refused(name: str) -> None:
    wide = {str(key): "" for key in range(MAX_KEYS + 1)}
    for value in (wide, {"a": [wide]}):
        with pytest.raises(BadRequest, match=f"{name}' has an object of more than {MAX_KEYS} keys"):
            parse(CompletionFields, json.dumps({"prompt": "a", name: value}).encode())


@pytest.mark.parametrize("levels", [MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1])
def test_the_gateway_and_the_server_allow_the_same_nesting(levels: int) -> None:
    """The gateway's image has no orchestrator, so each has the limit; what passes one door must pass the other."""
    text = "{" + '"metadata": {' * (levels - 1) + "}" * levels
    body = f'{{"prompt": "a", {text[1:]}'
    if levels > MAX_JSON_DEPTH:
        with pytest.raises(RequestError, match="nested more than 100 levels"):
            json_object(body, "the body", RequestError)
        with pytest.raises(BadRequest, match="nested more than 100 levels"):
            parse(CompletionFields, body.encode())
    else:
        assert json_object(body, "the body", RequestError)["prompt"] == "a"
        assert parse(CompletionFields, body.encode()).prompt == "a"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"null", ["a JSON object", "got null"]),
        (b"[1]", ["a JSON object", "got [1]"]),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", [f"nested more than {MAX_DEPTH} levels"]),
    ],
)
def test_a_body_that_is_no_object_is_shown_as_json(raw: bytes, words: list[str]) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(CompletionFields, raw)
    assert all(word in str(refused.value) for word in words)


def test_tools_and_images_are_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
    messages = {"messages": [{"role": "user", "content": [image]}]}
    for body, words in (
        (messages, "'image_url'"),
        ({**CHAT, "tools": [{"type": "function"}]}, "tools.0.function"),
    ):
        with pytest.raises(BadRequest, match=words):
            parse(ChatFields, json.dumps(body).encode())


def test_a_json_object_is_an_object() -> None:
    body = {"prompt": "a", "response_format": {"type": "json_object"}}
    inputs = parse(CompletionFields, json.dumps(body).encode()).inputs()
    assert inputs["guided_decoding_guide_type"] == "json_schema"
    assert json.loads(inputs["guided_decoding_guide"]) == {"type": "object"}


@pytest.mark.parametrize("part", ["[]", '{"a": [1]}', "[[[[]]]]", '{"]\\\\": "\\"", "[": []}'])
def test_more_parts_than_memory_has_room_for_are_refused_before_they_are_made(part: str) -> None:
    num_parts = json.dumps(json.loads(part, object_pairs_hook=lambda pairs: [value for _, value in pairs])).count("[")
    for most, is_refused in (((MAX_PARTS - 2) // num_parts, False), (MAX_PARTS // num_parts, True)):
        body = f'{{"prompt": "a", "metadata": [{",".join([part] * most)}]}}'.encode()
        if not is_refused:
            parse(CompletionFields, body)
            continue
        with pytest.raises(BadRequest, match="more than 65536 objects and lists"):
            parse(CompletionFields, body)


@pytest.mark.parametrize("text", ["[{" * MAX_PARTS, '\\"[' * MAX_PARTS, "\\" * MAX_PARTS + "[" * MAX_PARTS + '"'])
def test_brackets_in_a_text_are_text(text: str) -> None:
    assert parse(CompletionFields, json.dumps({"prompt": text}).encode()).prompt == text


def test_a_text_without_an_end_is_refused_soon() -> None:
    body = b'{"prompt": "' + b'\\"[{' * (1 << 21)
    with pytest.raises(BadRequest, match="not JSON"):
        parse(CompletionFields, body)
