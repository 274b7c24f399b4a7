"""OTLP/HTTP receiver: keeps the spans that are posted to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class OtlpReceiver(HTTPServer):
    """Receiver on an ephemeral port of the loopback; ``requests`` are (path, headers, body)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, Any, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Any]:
        """Spans of all requests, as the protocol's messages, in the order in which they came."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        bodies = [ExportTraceServiceRequest.FromString(body) for _, _, body in self.requests]
        return [
            span
            for body in bodies
            for resource in body.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: OtlpReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.path, self.headers, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[OtlpReceiver]:
    """Receive until the block ends."""
    with OtlpReceiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
