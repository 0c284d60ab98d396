"""Tool calls: the tools of a request, how its template writes calls, and the calls in the text of a model.

A template of Hermes' kind (ChatML, Qwen) has each call as an object between `<tool_call>` and `</tool_call>`; one of
Llama 3's kind has bare objects from the beginning of the output on, separated by `;`. A call that must be made, and a
text that must match a schema beside tools, are bare objects too, since the grammar of such an output begins with `{`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chat_template import ChatTemplates
from gateway.errors import BadRequest, abbreviated
from gateway.fields import ChatFields

#: What a call's object calls its arguments, by the kind of template; both are read.
ARGUMENTS = {"hermes": "arguments", "llama3": "parameters"}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')
#: A string of JSON, to the end if it is not closed.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
#: A bare object that has no name of a tool in this many characters is no call.
_MAX_HEAD = 256
_DECODER = json.JSONDecoder()


def kind_of(template: str) -> str | None:
    """Return how a chat template writes calls; None if it shows none that we know."""
    if _OPEN in template:
        return "hermes"
    return "llama3" if '"name"' in template and '"parameters"' in template else None


@dataclass(frozen=True)
class ToolUse:
    """How the tools of a request are used.

    tools: those that may be called, and shown: those that the template shows, as the client wrote them.
    kind: how the template writes calls. is_bare: a call is a bare object. must_call: the output is one call.
    """

    tools: Sequence[Mapping[str, Any]]
    shown: Sequence[Mapping[str, Any]]
    kind: str
    is_bare: bool = False
    must_call: bool = False
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """The functions' names."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    def schema(self, content: Any = None) -> dict[str, Any]:
        """Return the schema of an output that is one call or, with the schema of a content, that content."""
        calls = [self._call_schema(tool["function"]) for tool in self.tools]
        return {"anyOf": calls if content is None else [*calls, content]}

    def _call_schema(self, function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = ARGUMENTS[self.kind]
        parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, arguments: parameters},
            "required": ["name", arguments],
            "additionalProperties": False,
        }

    def parser(self) -> CallParser:
        """Return a parser of one output."""
        return CallParser(self.names, self.is_bare or self.kind == "llama3", self.is_parallel)


def tool_use_of(fields: ChatFields, templates: ChatTemplates, parser: str) -> ToolUse | None:
    """Return how a request's tools are used, None if they are not; raises BadRequest. parser: the setting."""
    mode, names = fields.choice
    known = {tool["function"]["name"] for tool in fields.tools}
    if unknown := next((name for name in names or () if name not in known), None):
        raise BadRequest(f"tool_choice names the tool {abbreviated(unknown)}, which tools does not have", "tool_choice")
    if mode == "required" and not fields.tools:
        raise BadRequest("tool_choice needs tools", "tool_choice")
    if mode == "none" or not fields.tools:
        return None
    kind = kind_of(templates.source(fields.tools)) if parser == "auto" else parser
    if not kind or not templates.reads("tools", fields.tools):
        raise BadRequest(
            f"the chat template of {templates.model!r} has no tools, or writes calls in a way that is not known here; "
            "give the gateway a template with tools (--chat-template), or say how it writes calls (--tool-parser)",
            "tools",
        )
    guide = fields.response_format.type
    if guide == "regex" and mode == "auto":
        raise BadRequest("response_format of type regex excludes tools, unless one must be called", "response_format")
    tools = [tool for tool in fields.tools if names is None or tool["function"]["name"] in names]
    is_parallel = fields.parallel_tool_calls is not False
    return ToolUse(
        tools,
        tools if mode == "auto" else fields.tools,
        kind,
        mode == "required" or guide != "text",
        mode == "required",
        is_parallel,
    )


class CallParser:
    """Splits an output, piece by piece, into content and calls; joined, the parts do not depend on the pieces.

    names: the tools that a bare object may call. num_calls: the calls begun.
    """

    def __init__(self, names: frozenset[str], is_bare: bool, is_parallel: bool = True) -> None:
        self._names, self._is_bare, self._is_parallel = names, is_bare, is_parallel
        self.num_calls = 0
        self._rest = ""
        self._num_sent = 0  # characters of the rest that have been passed on as arguments
        self._step: Callable[[bool], bool] = self._text  # each returns whether another may follow at once
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def push(self, piece: str, is_last: bool = False) -> dict[str, Any]:
        """Return what a piece adds to a message: `content` and `tool_calls`, each absent if nothing."""
        self._rest += piece
        while self._step(is_last):
            pass
        content, calls = "".join(self._content), list(self._calls.values())
        self._content, self._calls = [], {}
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def _text(self, is_last: bool) -> bool:
        """Before a call."""
        if self._is_bare:
            stripped = self._rest.lstrip(" \t\r\n;" if self.num_calls else None)
            if stripped:
                self._rest = stripped if stripped[0] == "{" else self._rest
                self._step = self._head if stripped[0] == "{" else self._plain
            return bool(stripped)
        before, found, after = self._rest.partition(_OPEN)
        if found:
            self._add_content(before.rstrip())
            self._rest, self._step = after, self._head
            return True
        shown = len(before) if is_last else len(before[: len(before) - _num_begun(before, _OPEN)].rstrip())
        if not (self.num_calls and not before[:shown].strip()):
            self._add_content(before[:shown])
            self._rest = before[shown:]
        return False

    def _head(self, is_last: bool) -> bool:
        """In a call, before its arguments."""
        if match := _HEAD.match(self._rest):
            name = json.loads(match[1], strict=False)
            if self._is_bare and name not in self._names:
                return self._become_plain()
            if self._rest[match.end()] != '"':  # some models write the object as a text
                self._begin(name)
                self._rest, self._num_sent, self._step = self._rest[match.end() :], 0, self._arguments
                return True
        end, value = _value(self._rest.lstrip())
        if end:
            return self._take_whole(value, end + len(self._rest) - len(self._rest.lstrip()))
        if is_last or (self._is_bare and len(self._rest) > _MAX_HEAD) or (not self._is_bare and _CLOSE in self._rest):
            return self._become_plain()
        return False

    def _take_whole(self, value: Any, end: int) -> bool:
        """Read a call whose name does not come first, or whose arguments are a text."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or (self._is_bare and name not in self._names):
            return self._become_plain()
        arguments = value.get("arguments", value.get("parameters", {}))
        self._begin(name)
        self._add_arguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        self._rest, self._step = "}" + self._rest[end:], self._tail
        return True

    def _arguments(self, is_last: bool) -> bool:
        """In the arguments of a call, which are passed on as the model writes them."""
        end, _ = _value(self._rest)
        if not end and not self._is_bare:
            end = _mark_of_end(self._rest)  # for arguments that are no JSON
        held = 0 if is_last or self._is_bare else _num_begun(self._rest, _CLOSE)
        until = end or len(self._rest) - held
        self._add_arguments(self._rest[self._num_sent : until])
        self._num_sent = max(until, self._num_sent)
        if end:
            self._rest, self._step = self._rest[end:], self._tail
        return bool(end)

    def _tail(self, is_last: bool) -> bool:
        """In a call, behind its arguments."""
        _, found, after = self._rest.partition("}" if self._is_bare else _CLOSE)
        if found:
            self._rest, self._step = after, self._text if self._is_parallel else self._over
        return bool(found)

    def _plain(self, is_last: bool) -> bool:
        """In an output that has no further calls."""
        self._add_content(self._rest)
        self._rest = ""
        return False

    def _over(self, is_last: bool) -> bool:
        """Behind the only call that is allowed."""
        self._rest = ""
        return False

    def _become_plain(self) -> bool:
        self._rest = self._rest if self._is_bare else _OPEN + self._rest
        self._step = self._plain
        return True

    def _add_content(self, text: str) -> None:
        self._content.append(text)

    def _begin(self, name: str) -> None:
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": ""}}
        self._calls[self.num_calls] = {"index": self.num_calls, **call}
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            index = self.num_calls - 1
            call = self._calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            call["function"]["arguments"] += text


def _value(text: str) -> tuple[int, Any]:
    """Return where the JSON value at the beginning of a text ends, 0 if it does not, and the value."""
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return 0, None
    return end, value


def _mark_of_end(text: str) -> int:
    """Return where the mark of a call's end is, outside of strings of JSON; 0 if there is none."""
    masked = _STRING.sub(lambda found: " " * len(found[0]), text)
    return max(masked.find(_CLOSE), 0)


def _num_begun(text: str, mark: str) -> int:
    """Return how many characters at a text's end may begin a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
