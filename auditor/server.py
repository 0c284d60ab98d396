"""A running server under audit, over gRPC streams."""

from __future__ import annotations

import contextlib
import threading

import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from auditor.requests import Answer, Options, to_values
from clients.generate import stream_outputs

#: Time limit of one request: the reference model may share the machine with the server and slow it down.
LIMIT_S = 900.0


class AuditedServer:
    """Implements `AuditedSystem`: one client per thread; leaving the context closes them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._own = threading.local()
        self._clients = contextlib.ExitStack()

    def __enter__(self) -> AuditedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()

    def ask(self, prompt: str, options: Options) -> Answer:
        """Run one request to its end; raises InferenceServerException when the connection fails."""
        try:
            responses = stream_outputs(self._client(), {"text_input": prompt, **options}, limit_s=LIMIT_S)
            return Answer.of([to_values(outputs) for _, outputs in responses])
        except InferenceServerException as error:
            if error.status() is not None:
                raise
            return Answer(error=str(error))

    def _client(self) -> grpcclient.InferenceServerClient:
        if not hasattr(self._own, "client"):
            self._own.client = self._clients.enter_context(grpcclient.InferenceServerClient(self._url))
        return self._own.client
