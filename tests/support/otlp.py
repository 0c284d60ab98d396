"""Receives spans as a collector does: OTLP over HTTP with protobuf bodies (opentelemetry-proto, trace/v1)."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATH = "/v1/traces"


def plain(value: Any) -> Any:
    """Return an OTLP attribute's value."""
    kind = value.WhichOneof("value")
    return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a receiver, and the list to which it adds (resource attributes, span)."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == PATH and self.headers["Content-Type"] == "application/x-protobuf"
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {entry.key: plain(entry.value) for entry in part.resource.attributes}
                received.extend((resource, span) for scope in part.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join(10)
