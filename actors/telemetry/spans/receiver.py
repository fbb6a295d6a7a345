"""An OpenTelemetry collector, to which recorded spans are sent by the SDK's own exporters.

Invariant: a span is sent with the ids and times that it was recorded with, so that sending it again would not make it
another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from headrace.actors.errors import ConfigError
from headrace.actors.telemetry.spans.conventions import (
    conventional_attributes,
    conventional_name,
    conventional_resource,
    kind_of,
)
from headrace.serve.tracing.telemetry import EXAMPLES, OtlpProtocol, check_receiver

BATCH_SPANS: Final = 512
"""Spans in one request."""
EXPORT_S: Final = 10.0
"""Time that a collector gets for one request, including the exporter's own retries."""
SCOPE: Final = InstrumentationScope("headrace")


class Receiver:
    """A collector at `url`. Blocking; one call at a time."""

    def __init__(self, url: str, protocol: OtlpProtocol) -> None:
        self.url = url
        self._exporter: SpanExporter
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            self._exporter = GrpcExporter(endpoint=url, insecure=url.startswith("http://"), timeout=EXPORT_S)
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            self._exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)
        self._resources: dict[int, tuple[Mapping[str, Any], Resource]] = {}

    def send(self, spans: Iterable[Mapping[str, Any]]) -> bool:
        """Send recorded spans in one request; return whether the collector took them, within about `EXPORT_S`."""
        readable = []
        for span in spans:
            found = span["resource"]
            # The reader gives all spans of a process one object, which is held so that its id stays its own.
            known = self._resources.get(id(found))
            if known is None:
                known = self._resources[id(found)] = found, Resource(conventional_resource(found))
            readable.append(readable_span(span, known[1]))
        return self._exporter.export(readable) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()


def readable_span(span: Mapping[str, Any], resource: Resource) -> ReadableSpan:
    """Return a recorded span as the SDK's exporters take it, under its conventional names."""
    name, attributes = span["name"], span.get("attributes", {})
    code = {"ok": StatusCode.OK, "error": StatusCode.ERROR}.get(span["status"], StatusCode.UNSET)
    return ReadableSpan(
        name=conventional_name(name, attributes),
        context=context_of(span["trace_id"], span["span_id"]),
        parent=context_of(span["trace_id"], span["parent_id"]) if span["parent_id"] else None,
        resource=resource,
        attributes=conventional_attributes(name, attributes),
        events=[Event(each["name"], each["attributes"], each["time_ns"]) for each in span.get("events", ())],
        links=[
            Link(context_of(each["trace_id"], each["span_id"]), each["attributes"]) for each in span.get("links", ())
        ],
        kind=kind_of(name),
        status=Status(code, span.get("detail") if code is StatusCode.ERROR else None),
        start_time=span["start_ns"],
        end_time=span["end_ns"],
        instrumentation_scope=SCOPE,
    )


def context_of(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def send_all(url: str, protocol: str, spans: Iterable[Mapping[str, Any]]) -> int:
    """Send spans to a collector in requests of `BATCH_SPANS`; return their number. Raises ConfigError for an unknown
    protocol, a URL that is none for it, or a collector that does not take them."""
    if protocol not in EXAMPLES:
        raise ConfigError(f"unknown protocol {protocol!r}: {' or '.join(EXAMPLES)}")
    try:
        check_receiver(url, protocol)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    receiver, number = Receiver(url, protocol), 0
    remaining = iter(spans)
    while batch := list(islice(remaining, BATCH_SPANS)):
        if not receiver.send(batch):
            raise ConfigError(f"{url} does not take spans ({number} were sent before): is a collector running there?")
        number += len(batch)
    receiver.close()
    return number
