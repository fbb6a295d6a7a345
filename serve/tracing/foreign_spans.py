"""Spans that other programs send over OTLP/HTTP (https://opentelemetry.io/docs/specs/otlp/#otlphttp): agents in their
sandboxes, and engines.

Invariants:
- What an agent sends is hostile: its spans get the trace of its attempt, ids that no span of ours can have, limits on
  sizes and times, and no links. A parent that it names can only be another span of the same session, or its agent's.
- A span that is not taken is counted in the answer, as OTLP's partial success, and in the counts of lost spans if it
  was the queue that had no room.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import orjson
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.trace import SpanContext

from headrace.serve.tracing import span_names
from headrace.serve.tracing.otlp_lines import attributes_of, line_from, resource_of, values_of
from headrace.serve.tracing.span_files import SpanFile

PROTOBUF: Final = "application/x-protobuf"
MAX_SPANS: Final = 4096
"""Spans that are taken of one session: about a thousand turns of Claude Code."""
MAX_ATTRIBUTES: Final = 64
MAX_EVENTS: Final = 16
MAX_NAME_CHARACTERS: Final = 256
_DEPTH: Final = 4
"""Depth to which an attribute's lists and maps are kept."""
_MALFORMED: Final = (KeyError, TypeError, ValueError, AttributeError, RecursionError)

Span: TypeAlias = Mapping[str, Any]


class OtlpUnreadable(Exception):
    """The body of a request is not OTLP."""


@dataclass(slots=True)
class AgentTrace:
    """Span of an agent, below which its own spans are put. `since_s` is when its session was opened (Unix time)."""

    span: SpanContext
    since_s: float
    taken: int = 0

    def adopted(self, span: Span) -> dict[str, Any]:
        """Return a span that the agent sent, with what it cannot lie about. Raises one of `_MALFORMED`."""
        if self.taken >= MAX_SPANS:
            raise ValueError("too many spans")
        parent = str(span.get("parentSpanId") or "")
        of_agent = f"{self.span.span_id:016x}"
        since_ns, now_ns = int(self.since_s * 1e9), time.time_ns()
        end_ns = min(max(int(span["endTimeUnixNano"]), since_ns), now_ns)
        events, status = span.get("events", ()), span.get("status", {})
        attributes = bounded(values_of(span.get("attributes", ())))
        own = self._id(str(span["spanId"]))
        adopted = {
            "traceId": f"{self.span.trace_id:032x}",
            "spanId": own,
            "parentSpanId": of_agent if parent in ("", of_agent, str(span["spanId"])) else self._id(parent),
            "name": str(span.get("name", ""))[:MAX_NAME_CHARACTERS],
            "kind": int(span.get("kind", 0)) % 6,
            "startTimeUnixNano": str(min(max(int(span["startTimeUnixNano"]), since_ns), end_ns)),
            "endTimeUnixNano": str(end_ns),
            "attributes": attributes_of(attributes | {span_names.SENDER: "agent"}),
            "events": [
                {
                    "timeUnixNano": str(min(max(int(event.get("timeUnixNano", 0)), since_ns), now_ns)),
                    "name": str(event.get("name", ""))[:MAX_NAME_CHARACTERS],
                    "attributes": attributes_of(bounded(values_of(event.get("attributes", ())))),
                }
                for event in events[:MAX_EVENTS]
            ],
            "droppedEventsCount": len(events[MAX_EVENTS:]),
            "droppedLinksCount": len(span.get("links", ())),
            "status": {
                "code": int(status.get("code", 0)) % 3,
                "message": str(status.get("message", ""))[: span_names.MAX_TEXT_CHARACTERS],
            },
        }
        self.taken += 1
        return adopted

    def _id(self, given: str) -> str:
        """Return an id that depends on the agent's and on the trace, so that it is none of another trace's."""
        return hashlib.sha256(f"{self.span.trace_id} {self.span.span_id} {given}".encode()).hexdigest()[:16]


def engine_span(span: Span) -> dict[str, Any]:
    """Return a span that an engine sent, with its own ids. Raises one of `_MALFORMED`."""
    attributes = values_of(span.get("attributes", ())) | {span_names.SENDER: "engine"}
    ids = {"traceId": f"{int(span['traceId'], 16):032x}", "spanId": f"{int(span['spanId'], 16):016x}"}
    ids |= {key: str(int(span[key])) for key in ("startTimeUnixNano", "endTimeUnixNano")}
    return {**ids, **span, **ids, "attributes": attributes_of(attributes)}


def bounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes within the limits on foreign ones."""
    return {key[:MAX_NAME_CHARACTERS]: _cut(values[key], _DEPTH) for key in list(values)[:MAX_ATTRIBUTES]}


def _cut(value: Any, depth: int) -> Any:
    if isinstance(value, str | bytes):
        return value[: span_names.MAX_TEXT_CHARACTERS]
    if isinstance(value, list):
        return [_cut(each, depth - 1) for each in value[:MAX_ATTRIBUTES]] if depth else []
    if isinstance(value, Mapping):
        return {key: _cut(value[key], depth - 1) for key in list(value)[:MAX_ATTRIBUTES]} if depth else {}
    return value


class SpanIntake:
    """Writes spans of other programs to the file of this process. `project` are the attributes of the run, which a
    sender's resource gets beside its own."""

    def __init__(self, file: SpanFile, project: Mapping[str, Any]) -> None:
        self._file, self._project = file, dict(project)
        self._one = asyncio.Lock()

    async def take(self, body: bytes, content_type: str, adopt: Callable[[Span], dict[str, Any]]) -> tuple[bytes, str]:
        """Append the spans of a request that `adopt` returns. Return the body of the answer and its type. Raises
        OtlpUnreadable."""
        is_protobuf = content_type.startswith(PROTOBUF)
        # A large body, or a disk that does not answer, must not stop the loop; one at a time, since they share its CPU.
        async with self._one:
            rejected = await asyncio.to_thread(self._append, body, adopt, is_protobuf=is_protobuf)
        return _answer(rejected, is_protobuf=is_protobuf)

    def _append(self, body: bytes, adopt: Callable[[Span], dict[str, Any]], *, is_protobuf: bool) -> int:
        """Append the spans of a request; return the number of those that were not taken. Raises OtlpUnreadable."""
        lines, rejected = [], 0
        for sent, scopes in _groups_of(_document_of(body, is_protobuf=is_protobuf)):
            try:
                theirs = bounded(values_of(sent.get("attributes", ())))
                resource = orjson.dumps(resource_of(theirs | self._project))
            except _MALFORMED:
                rejected += sum(1 for _ in scopes)
                continue
            for scope, span in scopes:
                try:
                    line = line_from(adopt(span), resource, scope)
                except _MALFORMED:
                    rejected += 1
                    continue
                if self._file.admit():
                    lines.append(line)
                else:
                    rejected += 1
        if lines:
            self._file.append(lines)
        return rejected


def _document_of(body: bytes, *, is_protobuf: bool) -> dict[str, Any]:
    try:
        if not is_protobuf:
            sent = orjson.loads(body)
            if not isinstance(sent, dict):
                raise OtlpUnreadable("the body is not a JSON object")
            return sent
        message = ExportTraceServiceRequest.FromString(body)
        document: dict[str, Any] = MessageToDict(message, use_integers_for_enums=True)
    except (orjson.JSONDecodeError, DecodeError) as error:
        raise OtlpUnreadable(f"the body is not OTLP: {error}") from None
    for _, scopes in _groups_of(document):
        for _, span in scopes:
            # Protobuf's JSON has bytes in base64, OTLP's has ids in hexadecimal.
            for each in (span, *span.get("links", ())):
                ids = (key for key in ("traceId", "spanId", "parentSpanId") if key in each)
                each |= {key: b64decode(each[key]).hex() for key in ids}
    return document


def _groups_of(document: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Iterator[tuple[str, dict[str, Any]]]]]:
    """Yield each resource with its spans and the names of their scopes; what has another form is left out."""
    for group in _dicts(document.get("resourceSpans")):
        resource = group.get("resource")
        yield resource if isinstance(resource, dict) else {}, _spans_of(group)


def _spans_of(group: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for scope in _dicts(group.get("scopeSpans")):
        named = scope.get("scope")
        name = str(named.get("name", "")) if isinstance(named, dict) else ""
        yield from ((name[:MAX_NAME_CHARACTERS], span) for span in _dicts(scope.get("spans")))


def _dicts(found: Any) -> Iterator[dict[str, Any]]:
    return (each for each in found if isinstance(each, dict)) if isinstance(found, list) else iter(())


def _answer(rejected: int, *, is_protobuf: bool) -> tuple[bytes, str]:
    why = "malformed, beyond the limit of a session, or no room to queue them"
    if is_protobuf:
        response = ExportTraceServiceResponse()
        if rejected:
            response.partial_success.rejected_spans = rejected
            response.partial_success.error_message = why
        return response.SerializeToString(), PROTOBUF
    document = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": why}} if rejected else {}
    return orjson.dumps(document), "application/json"
