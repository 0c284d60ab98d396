"""The parts of OpenAI's requests: strict objects, numbers and lists within the server's limits, contents, messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_INT32 = 2**31 - 1
#: As wide as the server's inputs; the server itself checks which of these numbers a field may have.
Int = Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)]
# fail_fast: a list is refused at its first wrong item; otherwise a body full of wrong items would give as many errors.
Tokens = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT32)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class Fields(BaseModel):
    """A JSON object; every value has its declared type, and null means that the field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        is_object = isinstance(given, dict)
        return {name: value for name, value in given.items() if value is not None} if is_object else given


class StreamOptions(Fields):
    """What a stream shows beside the text.

    include_usage: send a last chunk with the usage. continuous_usage_stats: then each chunk has the usage so far, in
    which a prompt's tokens count once its text has ended.
    include_obfuscation: accepted, but nothing is obfuscated.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class TextPart(Fields):
    """A part of a text. cache_control: accepted, but prefixes are cached anyway."""

    type: Literal["text"]
    text: str
    cache_control: Any = None


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class Prediction(Fields):
    """The output that the client expects (OpenAI's predicted outputs)."""

    type: Literal["content"]
    content: Content


class JsonSchema(Fields):
    """A schema with its name; strict and description change nothing: the output always matches."""

    name: str
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Fields):
    """text, json_object, json_schema, and our own addition: regex."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None


class Function(Fields):
    """A function that the model may call. strict: a call that must be made always matches; others are the model's."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool of a request."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """A tool that must be called, or that may be."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Fields):
    """The tools that may be called, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedChoice(Fields):
    """OpenAI's tool_choice of type allowed_tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _as_written(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as its client wrote it, which is how the chat template shows it; its fields are checked."""
    Tool.model_validate(tool)
    return tool


Tools = Annotated[list[Annotated[dict[str, Any], AfterValidator(_as_written)]], Field(fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


def joined_text(content: Content) -> str:
    """Return a content, which may come in parts, as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(Fields):
    """A message of a chat; fields beyond role and content reach the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str
    content: Content | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as the client wrote it, for the chat template."""
        return self.model_dump(exclude_none=True)


Messages = Annotated[list[Message], Field(fail_fast=True)]
