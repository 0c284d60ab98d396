"""The executor bindings as a client's transport."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from orchestrator.core.errors import first_line
from runtime.trtllm.transport import Response, failed_response

log = logging.getLogger(__name__)


class ExecutorTransport:
    """Implements `runtime.trtllm.transport.Transport` over a tensorrt_llm.bindings.executor.Executor."""

    owns_engine = True

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def enqueue(self, payload: Any, deadline_s: float) -> int:
        """Enqueue a Request of the library. deadline_s: unused; the client enforces it."""
        request_id: int = self.executor.enqueue_request(payload)
        return request_id

    def takes_requests(self) -> bool:
        """Return whether the executor still takes requests."""
        return bool(self.executor.can_enqueue_requests())

    def responses(self, timeout_s: float) -> list[Response]:
        """Return the responses that have come; raises when the executor has failed."""
        return [_read(response) for response in self.executor.await_responses(timeout=timedelta(seconds=timeout_s))]

    def cancel(self, request_id: int) -> None:
        """Cancel a request."""
        self.executor.cancel_request(request_id)

    def shut_down(self) -> None:
        """Shut the executor down."""
        self.executor.shutdown()


def _read(response: Any) -> Response:
    """Return a response of the library as ours; one that cannot be read fails only its own request."""
    request_id = response.request_id
    try:
        if response.has_error():
            return failed_response(request_id, response.error_msg)
        result = response.result
        return Response(request_id, result, result.is_final, bool(result.output_token_ids[0]))
    except Exception as error:
        log.exception("a response to request %d cannot be read", request_id)
        return failed_response(request_id, f"its response cannot be read: {first_line(error)}")
