"""A running server as the auditor's subject, over gRPC streams."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType

from auditor.subject import Answer, Options
from tests.support.clients import Stream


class ServerSubject:
    """Implements `Subject`: one stream a thread; as a context manager it closes them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._own = threading.local()
        self._streams = ExitStack()

    def __enter__(self) -> ServerSubject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.close()

    def ask(self, prompt: str, options: Options) -> Answer:
        """Run one request to its end."""
        answer = self._stream().ask(text_input=prompt, **options)
        return Answer(error=answer.error) if answer.error else Answer.of(answer.parts)

    def _stream(self) -> Stream:
        if not hasattr(self._own, "stream"):
            self._own.stream = self._streams.enter_context(Stream(self._url))
        stream: Stream = self._own.stream
        return stream
