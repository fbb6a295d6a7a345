"""Set-up of the OpenTelemetry SDK.

Invariants:
- Ending a span never blocks: the span is put into a bounded queue. Spans are dropped if the queue is full, and batches
  if the disk is full.
- Shutdown writes all queued spans to the file first, and then gives a receiver `RECEIVER_SHUTDOWN_S`, whatever the
  exporter's own timeouts and retries: a receiver that does not answer loses the last spans, but delays no exit.
- A process writes its spans as JSON lines to a file of at most `max_file_bytes`, plus one earlier file (`.1`) of the
  same size.
- Root spans started by `tracing.start_rollout_span` get the trace id derived from the run and their attempt.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import orjson
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from pydantic import BaseModel, ConfigDict, Field, field_validator

from headrace.serve.observing import span_names
from headrace.serve.observing.tracing import root_attempt, trace_id_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

EXAMPLE: Final = "http://collector:4318/v1/traces"
RECEIVER_SHUTDOWN_S: Final = 1.0
"""Time that a receiver gets at shutdown for the spans that are still queued."""


class TelemetryConfig(BaseModel):
    """Destinations and limits of spans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    """If false, no SDK is configured: spans cost next to nothing and are not recorded."""
    recipe: str = ""
    """Name of the recipe in the resource of spans (`headrace.recipe`); by default that of its file."""
    otlp_endpoint: str | None = None
    """Full URL of an OTLP/HTTP trace receiver (`http://collector:4318/v1/traces`); with None, no spans are sent."""
    max_file_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Size at which the span file is renamed to `.1`, replacing the previous one."""
    max_queue_spans: int = Field(default=16384, ge=512)
    """Largest number of spans waiting for export; further spans are dropped."""
    flush_interval_s: float = Field(default=1.0, gt=0)
    """Longest time that a finished span stays in memory before it is written."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _full_url(cls, value: str | None) -> str | None:
        # The exporter accepts any URL and logs a failure for each batch, which nobody sees in an actor.
        if value is None:
            return None
        try:
            split = urlsplit(value)
            has_port = split.port != 0
        except ValueError as error:
            raise ValueError(f"{value!r} is not a URL ({error}); set it to one like {EXAMPLE!r}") from None
        if any(character.isspace() for character in value):
            raise ValueError(f"{value!r} has white space, which no URL has; set it to one like {EXAMPLE!r}")
        if split.scheme in ("http", "https") and split.hostname and has_port and split.path.strip("/"):
            return value
        host = (split.hostname if "//" in value else value.partition("/")[0].rpartition(":")[0]) or "localhost"
        raise ValueError(
            f"{value!r} is not the full URL of an OTLP/HTTP trace receiver; set it to one like "
            f'"http://{host}:4318/v1/traces" (4317 is the port of OTLP/gRPC, which is not supported)'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryHandle:
    """Handle to the set-up made by `configure`."""

    provider: TracerProvider | None
    to_file: SpanProcessor | None = None
    """Processor of the span file, a part of `provider`."""

    def tracer(self, name: str) -> Tracer:
        """Return a tracer of this set-up, even if the set-up is not installed globally."""
        return self.provider.get_tracer(name) if self.provider else trace.NoOpTracer()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Write the queued spans; return False if that takes too long."""
        return self.provider is None or self.provider.force_flush(int(timeout_s * 1000))

    def shutdown(self) -> None:
        """Write the queued spans, give a receiver `RECEIVER_SHUTDOWN_S` for them, and stop. Idempotent."""
        if self.provider is None:
            return
        if self.to_file is not None:
            self.to_file.shutdown()
        # A daemon thread, because an export in progress cannot be interrupted and must not delay the exit.
        stopping = Thread(target=self.provider.shutdown, name="telemetry-shutdown", daemon=True)
        stopping.start()
        stopping.join(RECEIVER_SHUTDOWN_S)


def configure(
    config: TelemetryConfig,
    *,
    process: str,
    spans_dir: Path | None,
    run_id: str = "",
    install: bool = True,
) -> TelemetryHandle:
    """Set up the SDK for this process: spans go to `spans_dir/<process>.jsonl` and, if configured, to an OTLP receiver.

    `run_id` names the run in the spans' resource and in the trace ids of its rollouts. With `install`, it becomes the
    global provider, which a process can set only once. Raises OSError if the directory cannot be created.
    """
    if not config.enabled:
        return TelemetryHandle(provider=None)
    attributes = {
        "service.name": "headrace",
        "service.instance.id": process,
        "host.name": socket.gethostname(),
        span_names.RUN_ID: run_id,
        span_names.RECIPE: config.recipe,
    }
    provider = TracerProvider(
        resource=Resource.create(attributes),
        id_generator=RolloutIdGenerator(run_id),
        span_limits=SpanLimits(
            max_span_attributes=64, max_events=16, max_attribute_length=span_names.MAX_TEXT_CHARACTERS
        ),
        shutdown_on_exit=False,
    )
    exporters: list[SpanExporter] = []
    if spans_dir is not None:
        spans_dir.mkdir(parents=True, exist_ok=True)
        exporters.append(JsonLinesExporter(spans_dir / f"{process}.jsonl", config.max_file_bytes))
    if config.otlp_endpoint is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporters.append(OTLPSpanExporter(endpoint=config.otlp_endpoint))
    processors = [
        BatchSpanProcessor(
            exporter,
            max_queue_size=config.max_queue_spans,
            schedule_delay_millis=config.flush_interval_s * 1000,
            max_export_batch_size=512,
        )
        for exporter in exporters
    ]
    for processor in processors:
        provider.add_span_processor(processor)
    if install:
        trace.set_tracer_provider(provider)
    return TelemetryHandle(provider=provider, to_file=None if spans_dir is None else processors[0])


class RolloutIdGenerator(RandomIdGenerator):
    """Generator of random ids, except for the trace id of a rollout attempt's root span (tracing.py)."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def generate_trace_id(self) -> int:
        attempt = root_attempt.get()
        return super().generate_trace_id() if attempt is None else trace_id_for(self._run_id, *attempt)


class JsonLinesExporter(SpanExporter):
    """Exporter that appends spans to a file, in the batch processor's thread."""

    def __init__(self, path: Path, max_file_bytes: int) -> None:
        self._path = path
        self._max_file_bytes = max_file_bytes
        self._failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        data = b"".join(orjson.dumps(span_record(span), default=str) + b"\n" for span in spans)
        try:
            if self._path.exists() and self._path.stat().st_size + len(data) > self._max_file_bytes:
                self._path.replace(self._path.with_suffix(self._path.suffix + ".1"))
            with self._path.open("ab") as file:
                file.write(data)
        except OSError:
            if not self._failed:
                logger.exception("spans are lost: cannot write %s", self._path)
            self._failed = True
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing, since no file is kept open."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def span_record(span: ReadableSpan) -> dict[str, object]:
    """Return one line of the span file. Ids are hexadecimal, times are in nanoseconds since 1970, and `parent_id` is ""
    for a root span."""
    context = span.context
    return {
        "name": span.name,
        "trace_id": f"{context.trace_id:032x}" if context else "",
        "span_id": f"{context.span_id:016x}" if context else "",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name.lower(),
        "process": span.resource.attributes.get("service.instance.id", ""),
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": event.name, "time_ns": event.timestamp, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
    }
