"""Requests to a running server through the shipped client, one or many at once."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import tritonclient.grpc as grpcclient

from clients.generate import generate

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    """The answer to a request; num_in_pass: mean number of requests in its passes of the target."""

    ids: list[int]
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_in_pass: float


def ask(client: Any, text: str, **options: Any) -> Answer:
    """Run one streamed request to its end."""
    done = generate(client, text, return_stats=True, **options)
    totals = done.chunks[-1].totals
    return Answer(
        done.ids,
        totals["num_steps"],
        totals["total_draft_tokens"],
        totals["total_accepted_draft_tokens"],
        json.loads(totals["stats"])["requests_per_pass"],
    )


class ClientPool:
    """`size` gRPC clients, each on its own thread."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size = url, size
        self._own = threading.local()
        self._clients: list[Any] = []

    def map(self, run: Callable[[Any, Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return run(client, item) for every item, in order; `size` of them run at once."""
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(self._size) as pool:
            stack.callback(self._close)
            return list(pool.map(lambda item: run(self._client(), item), items))

    def _client(self) -> Any:
        if not hasattr(self._own, "client"):
            self._own.client = grpcclient.InferenceServerClient(self._url)
            self._clients.append(self._own.client)
        return self._own.client

    def _close(self) -> None:
        while self._clients:
            self._clients.pop().close()
