"""The fields of OpenAI's requests and our own: the values each may have, and the input of the server it becomes."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from gateway.errors import BadRequest, abbreviated
from gateway.values import (
    MAX_INT32,
    Fields,
    Int,
    Messages,
    NamedTool,
    Prediction,
    ResponseFormat,
    StreamOptions,
    Texts,
    Tokens,
    ToolChoice,
    Tools,
    joined_text,
)

MAX_TOP = 20

#: Fields that become an input of the same name.
PASSED = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "cache_salt", "speculation",
    "num_draft_tokens", "rule", "typical_epsilon", "typical_delta", "priority",
)  # fmt: skip
#: {input of the server: field of the request that it comes from}, if the names differ; for errors about inputs.
FIELD_OF_INPUT = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "stop_words": "stop",
    "stop_ids": "stop_token_ids",
    "logit_bias_ids": "logit_bias",
    "logit_bias_weights": "logit_bias",
    "guided_decoding_guide_type": "response_format",
    "guided_decoding_guide": "response_format",
    "draft_text": "prediction",
    "num_top_log_probs": "logprobs",
    "generated_ids": None,
}

#: OpenAI's fields that may be sent and change nothing; a response names those of its request (X-Ignored-Fields).
#: reasoning_effort is served where the chat template reads it.
IGNORED = (
    "metadata", "moderation", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "verbosity",
)  # fmt: skip
#: OpenAI's fields that are refused, and what to do instead. All others are served.
REFUSED = {
    "audio": "audio is not supported: the model writes text",
    "function_call": "function_call is the older name of tool_choice: use that",
    "functions": "functions is the older name of tools: use that",
    "suffix": "suffix is not supported: write it into the prompt as the model expects it",
    "web_search_options": "web search is not supported: offer a tool that searches (tools)",
}

_TOKENS = TypeAdapter(Tokens)


class GenerationFields(Fields):
    """The fields that completions and chats share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_INT32)
    max_tokens: Int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Texts = Field([], description="a string or a list of strings")
    seed: int | None = None
    logit_bias: dict[str, float] = {}
    response_format: ResponseFormat = ResponseFormat(type="text")
    prediction: Prediction | None = None
    # beyond OpenAI's, under vLLM's names where it has them
    top_k: Int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Tokens | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Tokens | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    timeout_ms: int | None = Field(None, ge=1, le=MAX_INT32)
    return_token_ids: bool = False
    # without effect on the text; they choose the replica
    prompt_cache_key: str | None = None
    user: str | None = None
    # ours
    speculation: str | None = None
    speculation_config: dict[str, Any] | str | None = None
    num_draft_tokens: Int | None = None
    rule: str | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    return_steps: bool = False
    # without effect (IGNORED)
    metadata: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    # accepted only with their defaults, which describe what the server does
    skip_special_tokens: Literal[True] = True
    include_stop_str_in_output: Literal[False] = False

    @property
    def num_top(self) -> int | None:
        """How many of the most probable tokens to report for each position; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """The maximum number of output tokens; None = no limit."""
        return self.max_tokens

    @property
    def ignored(self) -> tuple[str, ...]:
        """The fields of the request that change nothing, which its response names in a header."""
        return tuple(name for name in IGNORED if getattr(self, name) is not None)

    @property
    def affinity(self) -> str:
        """The client's mark of requests that should go to one replica; "" = no mark."""
        return self.prompt_cache_key or self.user or ""

    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the server that are the same for every prompt and choice; raises BadRequest."""
        inputs: dict[str, Any] = {name: value for name in PASSED if (value := getattr(self, name)) not in (None, [])}
        # The gateway fixes the seed, so that another replica can continue the text.
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 64)
        inputs |= {"stream": True, "return_stats": True, "seed": seed}
        if self.most_tokens is not None:
            inputs["max_tokens"] = self.most_tokens
        if self.stop:
            inputs["stop_words"] = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if self.stop_token_ids:
            inputs["stop_ids"] = self.stop_token_ids
        if self.speculation_config:
            config = self.speculation_config
            inputs["speculation_config"] = config if isinstance(config, str) else json.dumps(config)
        if self.num_top is not None:
            inputs |= {"return_log_probs": True, "num_top_log_probs": self.num_top}
        if self.return_steps:
            inputs["stream_steps"] = True
        return inputs | self._logit_bias() | self._guide() | self._prediction()

    def _logit_bias(self) -> dict[str, Any]:
        if not self.logit_bias:
            return {}
        try:
            ids = _TOKENS.validate_python(list(self.logit_bias))
        except ValidationError:
            raise BadRequest(
                f"logit_bias must have token ids (0..{MAX_INT32}) as keys, got {abbreviated(self.logit_bias)}",
                "logit_bias",
            ) from None
        return {"logit_bias_ids": ids, "logit_bias_weights": list(self.logit_bias.values())}

    def text_schema(self) -> Any:
        """Return the schema that the text must match; None if it need not match one."""
        if self.response_format.type == "json_object":
            return {"type": "object"}
        return self.response_format.json_schema and self.response_format.json_schema.schema_

    def _guide(self) -> dict[str, Any]:
        kind, schema, regex = self.response_format.type, self.response_format.json_schema, self.response_format.regex
        if (kind == "json_schema") != (schema is not None) or (kind == "regex") != (regex is not None):
            raise BadRequest(
                f"response_format of type {kind!r} must have the field of that name, and no other", "response_format"
            )
        if regex is not None:
            return {"guided_decoding_guide_type": kind, "guided_decoding_guide": regex}
        return {} if kind == "text" else schema_guide(self.text_schema())

    def _prediction(self) -> dict[str, Any]:
        if self.prediction is None:
            return {}
        text = joined_text(self.prediction.content)
        return {"draft_text": text} if text else {}


def schema_guide(schema: Any) -> dict[str, Any]:
    """Return the inputs that make an output match a schema."""
    return {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(schema)}


class CompletionFields(GenerationFields):
    """POST /v1/completions."""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)] = Field(
        description="a string, a list of token ids, or a list of such prompts of one kind"
    )
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    best_of: Int | None = None

    @property
    def num_top(self) -> int | None:
        """How many of the most probable tokens to report for each position; None: no log-probabilities."""
        return self.logprobs

    def prompts(self) -> list[str | Tokens]:
        """Return the prompts, each a text or a list of ids; raises BadRequest."""
        if self.best_of not in (None, self.n):
            raise BadRequest(f"best_of must be n ({self.n}) or absent, got {self.best_of}", "best_of")
        if self.echo and self.logprobs is not None:
            raise BadRequest("echo and logprobs exclude each other: a prompt has no log-probabilities", "echo")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise BadRequest("prompt must not be empty", "prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)


class ChatFields(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] = ["text"]
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True

    @property
    def choice(self) -> tuple[str, list[str] | None]:
        """Whether a tool may (auto), must (required) or must not (none) be called, and which; None = any."""
        if isinstance(self.tool_choice, str):
            return self.tool_choice, None
        if isinstance(self.tool_choice, NamedTool):
            return "required", [self.tool_choice.function.name]
        allowed = self.tool_choice.allowed_tools
        return allowed.mode, [tool.function.name for tool in allowed.tools]

    @property
    def num_top(self) -> int | None:
        """How many of the most probable tokens to report for each position; None: no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """The maximum number of output tokens; None = no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeFields(Fields):
    """POST /tokenize: a text, or a chat."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    """POST /detokenize."""

    model: str = ""
    tokens: Tokens
