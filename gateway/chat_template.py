"""Chat templates as transformers renders them: the same environment, arguments and choice among named ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from gateway.errors import BadRequest

DEFAULT, TOOL_USE = "default", "tool_use"
#: Names under which clients send a message's reasoning; templates read the first one, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ChatTemplates:
    """A checkpoint's chat templates. sources: {name: source}. special_tokens: {name in templates: token}.

    A template that does not compile is an error of each chat, and a line in the log: completions need none.
    """

    model: str
    sources: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, found in self._compiled.items():
            if isinstance(found, Exception):
                log.error("the chat template %r of %s does not compile: %s", name, self.model, found)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt of a chat; raises BadRequest, with the reason, if the template cannot make one.

        messages, tools: as the client wrote them. arguments: may replace whatever else the template gets.
        """
        template, reads_parts = self._selected(tools)
        values = {
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
            **self.special_tokens,
            **arguments,
            "messages": [_message(message, reads_parts) for message in messages],
        }
        try:
            return template.render(values)
        except Exception as error:  # a template may raise anything
            reason = str(error) or type(error).__name__
            raise BadRequest(f"the chat template refuses these messages: {reason}", "messages") from None

    def reads(self, variable: str, tools: object = None) -> bool:
        """Return whether the template of a chat reads a variable that it gets from outside."""
        try:
            return variable in jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(self.source(tools)))
        except jinja2.TemplateError:
            return False

    def source(self, tools: object = None) -> str:
        """Return the source of a chat's template; "" if there is none."""
        return self.sources.get(self._name(tools), "")

    def _name(self, tools: object) -> str:
        return TOOL_USE if tools is not None and TOOL_USE in self.sources else DEFAULT

    def _selected(self, tools: object) -> tuple[jinja2.Template, bool]:
        """Return the template for a chat, and whether it reads the parts of contents; raises BadRequest."""
        found = self._compiled.get(self._name(tools))
        if isinstance(found, tuple):
            return found
        if found is not None:
            raise BadRequest(f"the chat template of {self.model!r} does not compile: {found}", "messages")
        if self.sources:
            names = ", ".join(sorted(self.sources))
            raise BadRequest(f"{self.model!r} has the chat templates {names}, and none is {DEFAULT!r}", "messages")
        raise BadRequest(
            f"{self.model!r} has no chat template: use /v1/completions, or give the gateway one (--chat-template)",
            "messages",
        )

    @cached_property
    def _compiled(self) -> dict[str, tuple[jinja2.Template, bool] | Exception]:
        return {name: _compile(source) for name, source in self.sources.items()}


def _compile(source: str) -> tuple[jinja2.Template, bool] | Exception:
    try:
        return _ENVIRONMENT.from_string(source), _reads_parts(_ENVIRONMENT.parse(source))
    except Exception as error:  # a syntax error of Jinja or of the Python that it generates, or nesting too deep
        return error


def _reads_parts(template: nodes.Template) -> bool:
    """Return whether a template goes through the parts of a content; contents are joined for one that cannot."""
    names = {"content"}  # also of macros' arguments
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    loops = (loop.iter for loop in template.find_all(nodes.For))
    items = (item.node for item in template.find_all(nodes.Getitem) if _is_index(item.arg))
    return any(_is_content(each, names) for each in (*loops, *items))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Return whether an expression is a message's content, perhaps behind a filter."""
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _is_index(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, int)


def _message(message: Mapping[str, Any], reads_parts: bool) -> dict[str, Any]:
    """Return a message as templates expect it: without nulls, the arguments of its tool calls as objects."""
    found = {key: value for key, value in message.items() if value is not None}
    if not reads_parts and isinstance(content := found.get("content"), list):
        found["content"] = "".join(part["text"] for part in content)
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_with_object(call) for call in calls]
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, _REASONING[0]: reasoning}


def _with_object(call: Any) -> Any:
    """Return a tool call whose arguments, which OpenAI's API has as a text of JSON, are the object itself."""
    if not (isinstance(call, dict) and isinstance(function := call.get("function"), dict)):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class _Generation(Extension):
    """`{% generation %}`, which marks what the model is trained on, and is no more than its content here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes between the tags, in a scope of their own."""
        line = next(parser.stream).lineno
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON, without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_ENVIRONMENT = _environment()
