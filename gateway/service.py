"""What the routes share, and how the fields of a request become its sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import BadRequest, ModelNotFound, abbreviated
from gateway.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    GenerationFields,
    TokenizeFields,
    schema_guide,
)
from gateway.formats import ChatFormat, Format
from gateway.generation import Generation, Progress
from gateway.jobs import Job
from gateway.metrics import Metrics
from gateway.replicas import Replicas
from gateway.settings import Settings
from gateway.tokenizer import Checkpoint
from gateway.tool_calls import ToolUse, tool_use_of
from gateway.triton import to_request

#: Each choice of each prompt is a request of its own to a server. Together, the requests of one body may have this many
#: times the bytes of the longest body.
MAX_COPIES = 4
#: The field that a chat template may read; without one, the field changes nothing.
EFFORT = "reasoning_effort"


@dataclass(eq=False)
class Gateway:
    """What the routes share. created: when this gateway began to serve the model, in seconds since 1970.

    The methods that tokenize or render a template may take seconds, so they are called on other threads.
    """

    settings: Settings
    checkpoint: Checkpoint
    replicas: Replicas
    metrics: Metrics = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.replicas.all)

    def completion(self, fields: CompletionFields, request_id: str, key_label: str = "") -> Job:
        """Return the job of a completion request; raises BadRequest or ModelNotFound. key_label: for the metrics."""
        prompts = fields.prompts()
        for prompt in prompts:  # before it is copied for each choice
            if isinstance(prompt, str):
                self.checkpoint.check_length(prompt, "prompt")
            else:
                self.checkpoint.check_num_ids(len(prompt), "prompt")
        inputs = [{"text_input": prompt} if isinstance(prompt, str) else {"input_ids": prompt} for prompt in prompts]
        echo: list[str] = []
        if fields.echo:
            echo = [prompt if isinstance(prompt, str) else self.checkpoint.decode(prompt) for prompt in prompts]
        return self._job(fields, inputs, Format, echo, request_id, key_label)

    def chat(self, fields: ChatFields, request_id: str, key_label: str = "") -> Job:
        """Return the job of a chat request; raises BadRequest or ModelNotFound. key_label: for the metrics."""
        use = tool_use_of(fields, self.checkpoint.templates, self.settings.tool_parser)
        text, ignored = self._prompt(fields, use)
        self.checkpoint.check_length(text, "messages")
        # The template writes the special tokens itself.
        ids = self.checkpoint.encode(text, add_special_tokens=False)
        self.checkpoint.check_num_ids(len(ids), "messages")
        inputs = {"input_ids": ids}
        if use and use.is_bare:
            inputs |= schema_guide(use.schema(None if use.must_call else fields.text_schema()))
        job = self._job(fields, [inputs], ChatFormat, [], request_id, key_label)
        job.ignored, job.format.tool_use = ignored, use
        return job

    def _prompt(self, fields: ChatFields, use: ToolUse | None) -> tuple[str, tuple[str, ...]]:
        """Return a chat as text, and the fields that change nothing; raises BadRequest."""
        arguments, templates = fields.chat_template_kwargs, self.checkpoint.templates
        if wrong := next((name for name in ("messages", "tools") if name in arguments), None):
            raise BadRequest(f"chat_template_kwargs must not have the key {wrong!r}", "chat_template_kwargs")
        arguments = {"add_generation_prompt": fields.add_generation_prompt, **arguments}
        ignored = fields.ignored
        if templates.reads(EFFORT) and fields.reasoning_effort is not None:
            arguments.setdefault(EFFORT, fields.reasoning_effort)
            ignored = tuple(name for name in ignored if name != EFFORT)
        messages = [message.for_template() for message in fields.messages]
        return templates.render(messages, arguments, use.shown if use else None), ignored

    def _job(
        self,
        fields: GenerationFields,
        prompts: list[dict[str, Any]],
        format_class: type[Format],
        echo: list[str],
        request_id: str,
        key_label: str,
    ) -> Job:
        """Return the job of a request; prompts: the inputs that differ from prompt to prompt."""
        self.check_model(fields.model)
        num_sequences = len(prompts) * fields.n
        if num_sequences > self.settings.max_sequences:
            raise BadRequest(
                f"prompts × n must be at most {self.settings.max_sequences}, got {len(prompts)} × {fields.n}", "n"
            )
        inputs = fields.inputs()
        self._check_size(inputs, prompts, fields.n)
        limit_s = min(self.settings.request_timeout_s, (fields.timeout_ms or 86_400_000) / 1000)
        deadline_s, progress = time.monotonic() + limit_s, Progress()
        sequences = [
            Generation(
                inputs | prompt | ({"sequence_index": index} if index else {}),
                self.replicas,
                self.settings,
                self.metrics,
                deadline_s,
                request_id,
                fields.affinity,
                progress,
            )
            for prompt in prompts
            for index in range(fields.n)
        ]
        options = fields.num_top, fields.return_token_ids, fields.return_steps, "draft_text" in inputs
        response_format = format_class(self.checkpoint, inputs["seed"], *options)
        repeated = [text for text in echo for _ in range(fields.n)]
        return Job(
            sequences,
            response_format,
            self.metrics,
            fields.n,
            repeated,
            fields.stream_options,
            key_label,
            fields.ignored,
        )

    def _check_size(self, inputs: dict[str, Any], prompts: list[dict[str, Any]], n: int) -> None:
        """Raise BadRequest if one body would become more bytes than a server, or this gateway, should hold for it."""
        num_bytes = n * sum(to_request(inputs | prompt).ByteSize() for prompt in prompts)
        most = MAX_COPIES * self.settings.max_body_bytes
        if num_bytes > most:
            raise BadRequest(
                f"prompts × n become requests of {num_bytes} bytes together, at most {most} allowed "
                f"({MAX_COPIES} × max_body_bytes)",
                "n",
            )

    def tokenize(self, fields: TokenizeFields) -> dict[str, Any]:
        """Return the tokens of a text or a chat; raises BadRequest or ModelNotFound."""
        self.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise BadRequest("either prompt or messages must be given, not both", "prompt")
        text, special_tokens = fields.prompt or "", fields.add_special_tokens
        if fields.messages is not None:
            messages = [message.for_template() for message in fields.messages]
            text = self.checkpoint.templates.render(messages, {"add_generation_prompt": fields.add_generation_prompt})
            special_tokens = False
        self.checkpoint.check_length(text, "prompt" if fields.messages is None else "messages")
        ids = self.checkpoint.encode(text, add_special_tokens=special_tokens)
        strings = [self.checkpoint.tokenizer.id_to_token(token) for token in ids] if fields.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.checkpoint.max_positions, "tokens": ids, "token_strs": strings}

    def detokenize(self, fields: DetokenizeFields) -> dict[str, Any]:
        """Return the text of tokens; raises BadRequest or ModelNotFound."""
        self.check_model(fields.model)
        self.checkpoint.check_num_ids(len(fields.tokens), "tokens", room=0)
        vocab_size = self.checkpoint.vocab_size
        if (wrong := next((token for token in fields.tokens if token >= vocab_size), None)) is not None:
            raise BadRequest(f"tokens must be in 0..{vocab_size - 1}, got {wrong}", "tokens")
        return {"prompt": self.checkpoint.decode(fields.tokens)}

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound for a model that is not served here."""
        if name not in ("", self.checkpoint.name):
            raise ModelNotFound(
                f"model {abbreviated(name)} is not served here (available: {self.checkpoint.name})", "model"
            )

    def model_card(self) -> dict[str, Any]:
        """Return the model as /v1/models shows it."""
        card = {"id": self.checkpoint.name, "object": "model", "created": self.created, "owned_by": "specserve"}
        return card | {"max_model_len": self.checkpoint.max_positions}
