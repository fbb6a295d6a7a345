"""Spans of the OpenTelemetry API that are made to be written to a file.

The SDK's spans cost three times as much and more (`scripts/bench tracing --parts span`): they are made for any sampler,
processor and exporter. Those that a receiver gets are made by the SDK, from the files
(`actors/telemetry/spans/receiver.py`).

Invariants:
- Attributes, links and events beyond the limits are dropped; texts are cut off at `MAX_TEXT_CHARACTERS`.
- A span that has ended does not change, and is handed over once.
- A root span is recorded always, another one if its parent is.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from types import TracebackType
from typing import Final, NamedTuple

from opentelemetry import context as context_api
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.util.types import AnyValue, Attributes

from headrace.serve.tracing.span_names import MAX_TEXT_CHARACTERS
from headrace.serve.tracing.tracing import root_attempt, root_span_id_for, trace_id_for

MAX_ATTRIBUTES: Final = 64
MAX_EVENTS: Final = 16
MAX_LINKS: Final = 8192
"""A step links to each member of its batch."""
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status()


class SpanEvent(NamedTuple):
    """Something that happened in a span; `timestamp` in nanoseconds since 1970."""

    name: str
    attributes: dict[str, AnyValue]
    timestamp: int


class RecordedSpan(Span):
    """A span in memory. Its attributes have the names of the SDK's `ReadableSpan`; times are in nanoseconds since 1970,
    and `end_time` is None until it ends."""

    __slots__ = (
        "_ended",
        "attributes",
        "context",
        "end_time",
        "events",
        "links",
        "name",
        "parent",
        "start_time",
        "status",
    )

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_time: int,
        ended: Callable[[RecordedSpan], None],
    ) -> None:
        self.name, self.context, self.parent = name, context, parent
        self.start_time = start_time
        self.end_time: int | None = None
        self.status = _UNSET
        self.attributes: dict[str, AnyValue] = {}
        self.events: list[SpanEvent] = []
        self.links: list[Link] = []
        self._ended = ended

    def get_span_context(self) -> SpanContext:
        return self.context

    def is_recording(self) -> bool:
        return self.end_time is None

    def set_attribute(self, key: str, value: AnyValue) -> None:
        if self.end_time is None:
            _put(self.attributes, key, value)

    def set_attributes(self, attributes: Mapping[str, AnyValue]) -> None:
        if self.end_time is None:
            for key, value in attributes.items():
                _put(self.attributes, key, value)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if self.end_time is None and len(self.events) < MAX_EVENTS:
            self.events.append(SpanEvent(name, _kept(attributes), time_ns() if timestamp is None else timestamp))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        if self.end_time is None and len(self.links) < MAX_LINKS:
            self.links.append(Link(context, _kept(attributes)))

    def update_name(self, name: str) -> None:
        if self.end_time is None:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status, unless it is OK, which is final
        (https://opentelemetry.io/docs/specs/otel/trace/api/#set-status)."""
        given = status if isinstance(status, Status) else Status(status, description)
        if self.end_time is None and self.status.status_code is not StatusCode.OK and not given.is_unset:
            self.status = given

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        kind = type(exception)
        named: dict[str, AnyValue] = {
            "exception.type": ("" if kind.__module__ == "builtins" else f"{kind.__module__}.") + kind.__qualname__,
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", named | dict(attributes or {}), timestamp)

    def end(self, end_time: int | None = None) -> None:
        if self.end_time is None:
            self.end_time = time_ns() if end_time is None else end_time
            self._ended(self)


class CurrentSpan:
    """Context manager that makes a span the current one, and ends it if wished. An exception is recorded, and makes it
    an error, if these are wished; what does not derive from Exception (a cancellation) is neither."""

    __slots__ = ("_end", "_record_exception", "_set_status", "_span", "_token")

    def __init__(self, span: Span, *, record_exception: bool, set_status_on_exception: bool, end: bool) -> None:
        self._span, self._end = span, end
        self._record_exception, self._set_status = record_exception, set_status_on_exception

    def __enter__(self) -> Span:
        self._token = context_api.attach(set_span_in_context(self._span))
        return self._span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        context_api.detach(self._token)
        if isinstance(error, Exception):
            if self._record_exception:
                self._span.record_exception(error)
            if self._set_status:
                self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        if self._end:
            self._span.end()


class SpanRecorder(TracerProvider, Tracer):
    """Provider of one tracer, itself, that hands spans of a run over when they end. `resource` names the process."""

    def __init__(
        self, ended: Callable[[RecordedSpan], None], *, run_id: str, resource: Mapping[str, str] | None = None
    ) -> None:
        self.resource = dict(resource or {})
        self._ended = ended
        self._run_id = run_id
        # The module's numbers have a state that a resumed learner restores: its steps would get the ids of those that
        # were undone, and tracing would change what training draws. Seeded by the operating system; asking that for
        # each id costs ten times as much.
        self._bits = random.Random().getrandbits

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> Tracer:
        return self

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        above = get_current_span(context).get_span_context()
        parent = above if above.is_valid else None
        if parent is not None and not parent.trace_flags.sampled:
            return NonRecordingSpan(parent)
        attempt = root_attempt.get()
        if attempt is None:
            span_id = self._bits(64) or 1
            trace_id = (self._bits(128) or 1) if parent is None else parent.trace_id
        else:
            span_id = root_span_id_for(self._run_id, *attempt)
            trace_id = trace_id_for(self._run_id, *attempt) if parent is None else parent.trace_id
        own = SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
        span = RecordedSpan(name, own, parent, time_ns() if start_time is None else start_time, self._ended)
        if attributes:
            span.set_attributes(attributes)
        if links:
            span.links = [Link(link.context, _kept(link.attributes)) for link in links[:MAX_LINKS]]
        return span

    def start_as_current_span(  # type: ignore[override]
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> CurrentSpan:
        """Start a span that is the current one in a `with` block. The API's result also decorates
        functions, and has a generator for each block: half the cost of a span."""
        span = self.start_span(name, context, kind, attributes, links, start_time)
        return CurrentSpan(
            span, record_exception=record_exception, set_status_on_exception=set_status_on_exception, end=end_on_exit
        )


def _put(kept: dict[str, AnyValue], key: str, value: AnyValue) -> None:
    """Add an attribute within the limits. Lists are copied; what is no attribute is added as text."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT_CHARACTERS:
            value = value[:MAX_TEXT_CHARACTERS]
    elif isinstance(value, list | tuple):
        value = tuple(each[:MAX_TEXT_CHARACTERS] if isinstance(each, str) else each for each in value)
    elif value is None:
        return
    if len(kept) < MAX_ATTRIBUTES or key in kept:
        kept[key] = value


def _kept(attributes: Attributes) -> dict[str, AnyValue]:
    kept: dict[str, AnyValue] = {}
    for key, value in (attributes or {}).items():
        _put(kept, key, value)
    return kept
