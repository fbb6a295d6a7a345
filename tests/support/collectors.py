"""OpenTelemetry collectors over HTTP and gRPC that keep what they are sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Collected:
    """Requests in the order in which they came. While `refusing` is a status or a name of gRPC's, requests are answered
    with it; requests with a span of the name `poison` are answered with 400."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.refusing: int | None = None
        self.poison = ""
        self.arrived = threading.Event()

    def add(self, request: ExportTraceServiceRequest) -> None:
        self.requests.append(request)
        self.arrived.set()

    def spans(self) -> list[dict[str, Any]]:
        """All spans, each with its name, ids, attributes, status and resource."""
        return [span for request in self.requests for span in spans_of(request)]


def spans_of(request: ExportTraceServiceRequest) -> list[dict[str, Any]]:
    """The spans of a request, each with its name, ids, attributes, status and resource."""
    return [
        {
            "name": span.name,
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent_id": span.parent_span_id.hex(),
            "attributes": _values(span.attributes),
            "status": span.status.code,
            "message": span.status.message,
            "links": [link.trace_id.hex() for link in span.links],
            "resource": _values(group.resource.attributes),
            "kind": span.kind,
        }
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


@contextmanager
def http_collector() -> Iterator[tuple[str, Collected]]:
    """A collector over HTTP on loopback: its URL, and what it was sent."""
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
            request = ExportTraceServiceRequest.FromString(body)
            if collected.refusing is not None:
                self.send_response(collected.refusing)
            elif any(span["name"] == collected.poison for span in spans_of(request)):
                self.send_response(400)
            else:
                collected.add(request)
                self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", collected
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def grpc_collector() -> Iterator[tuple[str, Collected]]:
    """A collector over gRPC on loopback: its URL, and what it was sent."""
    collected = Collected()

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            collected.add(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collected
    finally:
        server.stop(None).wait()


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
