"""Spans as lines of OTLP's JSON encoding, one span a line, and back.

A line is a `TracesData` document (https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding): ids are
hexadecimal, 64-bit numbers are text. The `otlpjsonfile` receiver of an OpenTelemetry collector reads such files.

Invariants:
- `traceId` is the first key of a span, so a reader finds the trace of a line without parsing it.
- Whatever a span holds, its line is valid: lone surrogates, numbers beyond 64 bits and infinite ones included.
  (Protobuf refuses a whole request for one lone surrogate.)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

STATUSES: Final = ("unset", "ok", "error")
_END: Final = b"]}]}]}\n"


def resource_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resource in OTLP's form."""
    return {"attributes": attributes_of(attributes)}


def line_of(span: ReadableSpan, resource: bytes) -> bytes:
    """Return the line of a span that has ended. `resource` is that of its process, as JSON."""
    context, scope = span.get_span_context(), span.instrumentation_scope
    assert context is not None
    document: dict[str, Any] = {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}
    if span.parent is not None:
        document["parentSpanId"] = f"{span.parent.span_id:016x}"
    # OTLP's kinds are the API's, after one for "unspecified".
    document |= {"name": span.name, "kind": span.kind.value + 1}
    document |= {"startTimeUnixNano": str(span.start_time), "endTimeUnixNano": str(span.end_time)}
    if span.attributes:
        document["attributes"] = attributes_of(span.attributes)
    if span.events:
        document["events"] = [
            {
                "timeUnixNano": str(event.timestamp),
                "name": event.name,
                "attributes": attributes_of(event.attributes or {}),
            }
            for event in span.events
        ]
    if span.links:
        document["links"] = [
            {
                "traceId": f"{link.context.trace_id:032x}",
                "spanId": f"{link.context.span_id:016x}",
                "attributes": attributes_of(link.attributes or {}),
            }
            for link in span.links
        ]
    for name, dropped in (
        ("droppedAttributesCount", span.dropped_attributes),
        ("droppedEventsCount", span.dropped_events),
        ("droppedLinksCount", span.dropped_links),
    ):
        if dropped:
            document[name] = dropped
    if code := span.status.status_code.value:
        document["status"] = {"code": code} | ({"message": span.status.description} if span.status.description else {})
    return line_from(document, resource, scope.name if scope is not None else "")


def line_from(span: Mapping[str, Any], resource: bytes, scope: str) -> bytes:
    """Return the line of a span in OTLP's JSON form. Its first key must be `traceId`."""
    try:
        body = orjson.dumps(span)
    except TypeError:
        # Text of an agent with half of a surrogate pair, which is not valid UTF-8.
        body = orjson.dumps(_valid(span))
    scope_name = orjson.dumps(scope)
    return b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":{"name":%b},"spans":[%b%b' % (
        resource,
        scope_name,
        body,
        _END,
    )


def attributes_of(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return attributes in OTLP's form."""
    return [{"key": key, "value": _any_value(value)} for key, value in attributes.items()]


def values_of(attributes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the attributes that OTLP's form stands for. Raises KeyError, TypeError, ValueError."""
    return {each["key"]: _plain(each["value"]) for each in attributes}


def _any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        in_range = -(2**63) <= value < 2**63
        return {"intValue" if in_range else "stringValue": str(value)}
    if isinstance(value, float):
        if math.isfinite(value):
            return {"doubleValue": value}
        # The names of protobuf's JSON encoding.
        return {"doubleValue": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": attributes_of(value)}}
    if isinstance(value, Sequence):
        return {"arrayValue": {"values": [_any_value(each) for each in value]}}
    return {} if value is None else {"stringValue": str(value)}


def _plain(value: Mapping[str, Any]) -> Any:
    for kind, found in value.items():
        match kind:
            case "intValue":
                return int(found)
            case "doubleValue":
                return float(found)
            case "arrayValue":
                return [_plain(each) for each in found.get("values", ())]
            case "kvlistValue":
                return values_of(found.get("values", ()))
            case "bytesValue":
                return base64.b64decode(found)
            case _:
                return found
    return None


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_valid(key): _valid(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_valid(each) for each in value]
    return value
