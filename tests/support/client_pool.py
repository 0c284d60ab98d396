"""Many requests to a running server at once, by shipped clients that are kept."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import tritonclient.grpc as grpcclient

Item = TypeVar("Item")
Result = TypeVar("Result")


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
