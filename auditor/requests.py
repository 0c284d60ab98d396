"""What is audited: anything that answers a prompt, and says on request what its steps were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

Options = Mapping[str, Any]
#: The outputs that are lists; the others are scalars.
LISTS = frozenset({"output_ids", "step_lengths", "output_log_probs"})


@dataclass(frozen=True)
class Answer:
    """What came back. chunks: the text as it was streamed. steps: JSON, when asked for. error: why nothing came."""

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
    def of(cls, parts: Sequence[Mapping[str, Any]]) -> Answer:
        """Return the answer that a request's responses are, deltas of outputs by name."""
        last = parts[-1]
        return cls(
            tuple(token for part in parts for token in part["output_ids"]),
            tuple(part["text_output"] for part in parts),
            tuple(value for part in parts for value in part.get("output_log_probs", [])),
            last["finish_reason"],
            last.get("steps", ""),
        )


def to_value(name: str, array: np.ndarray) -> Any:
    """Return an output as a Python value: (1, n) tensors become lists or scalars, bytes become text."""
    items = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
    return items if name in LISTS else items[0]


class AuditedSystem(Protocol):
    """A server of some kind; any thread may ask."""

    def ask(self, prompt: str, options: Options) -> Answer:
        """Return the answer to one request; options: inputs of the model `speculative` by name."""


class AuditRequest(NamedTuple):
    """A request, and what it is called in the report."""

    name: str
    prompt: str
    options: Options

    def but(self, suffix: str, **options: Any) -> AuditRequest:
        """Return the request with other options."""
        return AuditRequest(f"{self.name}{suffix}", self.prompt, {**self.options, **options})


def ask_all(system: AuditedSystem, requests: Sequence[AuditRequest], at_once: int = 1) -> list[Answer]:
    """Return the answers in order; `at_once` requests run side by side."""
    if at_once == 1:
        return [system.ask(request.prompt, request.options) for request in requests]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: system.ask(request.prompt, request.options), requests))
