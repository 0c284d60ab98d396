"""The requests and answers of an audit, and the system that is audited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Options = Mapping[str, Any]
#: The outputs that are lists; the others are scalars.
LISTS = frozenset({"output_ids", "step_lengths", "output_log_probs"})


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    chunks: the text as it was streamed. steps: JSON, if `return_steps` was set. error: why the request failed, or "".
    """

    ids: tuple[int, ...] = ()
    chunks: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str = ""
    steps: str = ""
    error: str = ""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.chunks)

    @classmethod
    def of(cls, responses: Sequence[Mapping[str, Any]]) -> Answer:
        """Join a request's responses, each given as the outputs that it adds, by name."""
        last = responses[-1]
        return cls(
            tuple(token for response in responses for token in response["output_ids"]),
            tuple(response["text_output"] for response in responses),
            tuple(value for response in responses for value in response.get("output_log_probs", [])),
            last["finish_reason"],
            last.get("steps", ""),
        )


def to_values(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the output arrays of one response as Python values: lists or scalars, text decoded."""
    values = {}
    for name, array in outputs.items():
        items = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
        values[name] = items if name in LISTS else items[0]
    return values


class AuditedSystem(Protocol):
    """A system that serves the model `speculative`; may be called from several threads."""

    def ask(self, prompt: str, options: Options) -> Answer:
        """Run one request to its end; options: inputs of the model `speculative` by name."""


class AuditRequest(NamedTuple):
    """A request, and its name in the report."""

    name: str
    prompt: str
    options: Options

    def but(self, suffix: str, **options: Any) -> AuditRequest:
        """Return the request under another name and with other options."""
        return AuditRequest(f"{self.name}{suffix}", self.prompt, {**self.options, **options})


def ask_all(system: AuditedSystem, requests: Sequence[AuditRequest], at_once: int = 1) -> list[Answer]:
    """Return the answers in the order of the requests; up to `at_once` of them run concurrently."""
    if at_once == 1:
        return [system.ask(request.prompt, request.options) for request in requests]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: system.ask(request.prompt, request.options), requests))
