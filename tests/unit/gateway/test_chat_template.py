"""Chats as prompts: what transformers makes of the same files, and reasons where it makes nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.chat_template import ChatTemplates
from gateway.errors import BadRequest
from gateway.tokenizer import read_checkpoint
from tests.unit.gateway.test_tokenizer import write

pytestmark = pytest.mark.unit

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, 0.1], "ü": null}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": 'Say "é"\n'}, {"type": "text", "text": "<b>"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "why"},
    {"role": "tool", "content": "-0.1", "tool_call_id": "c"},
    {"role": "user", "content": "Again"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "dé"}}]
PARTS = """{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else -%}
{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"""
TEMPLATES = {
    "chatml": "{% for m in messages if m.role in ['system', 'tool'] %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
[SYS]{{ message.content | trim }}[/SYS]
    {%- elif message.role == 'user' %}
        {{- '[INST]' ~ (message.content[1].text if message.content is not string else message.content) | tojson }}
    {%- else %}
        {{- 'x' + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "loop": "{% for m in messages if m.role != 'system' %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "no tools": "{% if tools is not none %}TOOLS{% endif %}{% if documents is not none %}DOCS{% endif %}{{ documents }}",
    "tojson": "{{ messages[2].tool_calls | tojson(ensure_ascii=True, indent=2, sort_keys=True, separators=(',', ':')) }}"
    "{{ messages[2].tool_calls | tojson(ensure_ascii=False) }}",
    "calls": "{% for call in messages[2].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ 'content' in messages[2] }}{{ messages[2].reasoning_content }}{{ messages[2].thinking }}",
    "parts": PARTS,
    "macro": "{% macro text(content) %}{% for p in content %}[{{ p }}]{% endfor %}{% endmacro %}{{ text(messages[1].content) }}",
    "assigned": "{% set c = messages[1]['content'] %}{% for p in c | list %}[{{ p.type }}]{% endfor %}",
    "special": "{{ bos_token }}{{ eos_token }}{{ sep_token }}{{ cls_token }}{{ mask_token }}{{ pad_token }}{{ unk_token }}",
    "dict": "{{ dict(a=1) }}{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ range(3) | list }}",
}
NAMES = {
    "bos_token": "<s>",
    "sep_token": "<sep>",
    "mask_token": {"__type": "AddedToken", "content": "<mask>"},
    "cls_token": "<cls>",
}


def expected(folder: Path, messages: Any, **arguments: Any) -> str:
    """What transformers makes of a checkpoint; the arguments of calls are objects there, and texts in OpenAI's API."""
    from transformers import AutoTokenizer

    objects = json.loads(json.dumps(messages))
    for call in (call for message in objects for call in message.get("tool_calls") or []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return str(AutoTokenizer.from_pretrained(folder).apply_chat_template(objects, tokenize=False, **arguments))


def templates_of(folder: Path, file: str = "") -> ChatTemplates:
    return read_checkpoint(str(folder), file).templates


def of(source: str) -> ChatTemplates:
    return ChatTemplates("it", {"default": source})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_chats_are_those_of_transformers(tmp_path: Path, name: str, tools: Any) -> None:
    folder = write(tmp_path, tokenizer_class="PreTrainedTokenizerFast", chat_template=TEMPLATES[name], **NAMES)
    for adds in (True, False):
        wanted = expected(folder, CHAT, tools=tools, add_generation_prompt=adds)
        assert templates_of(folder).render(CHAT, {"add_generation_prompt": adds}, tools) == wanted


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_chat_with_tools_takes_the_template_of_that_name(tmp_path: Path, is_file: bool, tools: Any) -> None:
    named = {"default": "no {{ tools }}", "tool_use": "yes {{ tools | tojson }}", "rag": "never"}
    declared = {} if is_file else {"chat_template": [{"name": k, "template": v} for k, v in named.items()]}
    folder = write(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **declared)
    if is_file:
        (folder / "chat_template.jinja").write_text(named["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(named["tool_use"])
    assert templates_of(folder).render(CHAT, {}, tools) == expected(folder, CHAT, tools=tools)
    (tmp_path / "own").write_text("own")
    assert templates_of(folder, str(tmp_path / "own")).render(CHAT, {}, tools) == "own"


@pytest.mark.parametrize("declares", [True, False])
def test_special_tokens_may_have_a_file_of_their_own(tmp_path: Path, declares: bool) -> None:
    """Not beside `added_tokens_decoder`, which newer checkpoints have instead."""
    more = {"added_tokens_decoder": {"256": {"content": "<s>", "special": True}}} if declares else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ bos_token }}|{{ eos_token }}"}
    folder = write(tmp_path, **config, **more)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **more, "eos_token": "</s>"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}))
    assert templates_of(folder).render(CHAT, {}) == expected(folder, CHAT) == ("|</s>" if declares else "<s>|</s>")


def test_contents_in_parts_are_joined_for_a_template_that_cannot_read_them() -> None:
    assert of("{{ messages[1].content }}").render(CHAT, {}) == 'Say "é"\n<b>'


def test_arguments_reach_the_template_and_its_variables_are_known() -> None:
    template = of("{% set own = 1 %}{{ effort }}{{ bos_token }}{% if a %}{% set tools = none %}{% endif %}{{ tools }}")
    assert template.render(CHAT, {"effort": "low", "bos_token": "B"}) == "lowBNone"
    assert [template.reads(name) for name in ("effort", "tools", "own", "other")] == [True, True, False, False]


RECURSION = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.nothing.more }}", "nothing"),
        ("{{ 1 // 0 }}", "division"),
        (RECURSION, "recursion"),
        ("{{ messages | map('upper') | sum }}", "."),
        ("{{ 'x'.encode(1) }}", "str"),
        ("{% include 'x' %}", "loader"),
        ("{% for x in y %}", "does not compile.*endfor"),
        ("", "--chat-template"),
    ],
)
def test_what_a_template_raises_is_the_reason_of_a_refusal(source: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        (of(source) if source else ChatTemplates("it", {})).render(CHAT, {})


def test_a_template_that_does_not_compile_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    of("{% for x in y %}")
    assert "does not compile" in caplog.text


def test_named_templates_without_a_default_serve_only_tools() -> None:
    named = ChatTemplates("it", {"tool_use": "yes"})
    assert named.render(CHAT, {}, TOOLS) == "yes"
    with pytest.raises(BadRequest, match="tool_use, and none is 'default'"):
        named.render(CHAT, {})
