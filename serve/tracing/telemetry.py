"""Set-up of tracing in a process of the service.

Invariants:
- Spans go to files only (span_files.py): ending one never blocks, and no receiver can delay a process. What an
  OpenTelemetry collector gets is chosen from the files by the observer of the run.
- Root spans started by `tracing.start_rollout_span` get the ids derived from the run and their attempt.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.trace import Tracer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.serve.tracing import span_names
from headrace.serve.tracing.recorder import RecordedSpan, SpanRecorder
from headrace.serve.tracing.span_files import SUFFIX, SpanFile

OtlpProtocol: TypeAlias = Literal["http/protobuf", "grpc"]
"""Names of OTEL_EXPORTER_OTLP_PROTOCOL (https://opentelemetry.io/docs/specs/otel/protocol/exporter/)."""
EXAMPLES: Final[dict[OtlpProtocol, str]] = {
    "http/protobuf": "http://collector:4318/v1/traces",
    "grpc": "http://collector:4317",
}


class TelemetryConfig(BaseModel):
    """Destinations and limits of spans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    """If false, no SDK is configured: spans cost next to nothing and are not recorded."""
    recipe: str = ""
    """Name of the recipe in the resource of spans (`headrace.recipe`); by default that of its file."""
    otlp_endpoint: str | None = None
    """Full URL of an OTLP trace receiver: `http://collector:4318/v1/traces`, or with `otlp_protocol = "grpc"`
    `http://collector:4317`. The run's observer sends it the traces of slow, failed and stuck rollouts, of steps, pushes
    and evaluations, and `otlp_share` of the others. With None, nothing is sent; all spans are in the run directory."""
    otlp_protocol: OtlpProtocol = "http/protobuf"
    """Protocol of `otlp_endpoint`: `http/protobuf` or `grpc`."""
    otlp_share: float = Field(default=0.01, ge=0, le=1)
    """Share of the ordinary rollouts that are sent to the receiver, chosen by a hash of their trace id."""
    page: str | None = None
    """Address, such as `127.0.0.1:8787`, on which the run's observer serves the page of the run and `/metrics`; the
    address with its token is in `observer/page.json`. With None, `headrace observe` can serve the same."""
    page_key_file: Path | None = None
    """Private file with the token of the page; needed for an address other than loopback. None makes a token."""
    keep_bytes: int = Field(default=2**30, ge=4096)
    """Limit for the total size of the run's span files, which are compressed. Beyond it, the oldest ordinary spans are
    removed, and those of slow and failed rollouts last."""
    max_file_bytes: int = Field(default=8 * 2**20, ge=4096)
    """Size at which a span file is ended and compressed."""
    max_queue_spans: int = Field(default=16384, ge=512)
    """Largest number of spans of a process that wait to be written; further ones are lost, and counted."""
    flush_interval_s: float = Field(default=1.0, gt=0)
    """Longest time that an ended span stays in memory before it is written."""

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        if self.page is not None:
            host, _, port = self.page.rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise ValueError(f'page = {self.page!r} is no address; set it to one like "127.0.0.1:8787"')
        if self.otlp_endpoint is not None:
            check_receiver(self.otlp_endpoint, self.otlp_protocol)
        return self


def check_receiver(url: str, protocol: OtlpProtocol) -> None:
    """Raise ValueError unless `url` is a full URL for this protocol. (The exporters accept any text, and log a failure
    for each batch.)"""
    example = EXAMPLES[protocol]
    try:
        split = urlsplit(url)
        has_port = split.port != 0
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL ({error}); set it to one like {example!r}") from None
    if any(character.isspace() for character in url):
        raise ValueError(f"{url!r} has white space, which no URL has; set it to one like {example!r}")
    has_path = bool(split.path.strip("/"))
    if split.scheme in ("http", "https") and split.hostname and has_port and has_path is (protocol != "grpc"):
        return
    host = (split.hostname if "//" in url else url.partition("/")[0].rpartition(":")[0]) or "localhost"
    other = 'for OTLP/gRPC, set otlp_protocol = "grpc"' if protocol != "grpc" else "OTLP/gRPC has no path"
    raise ValueError(
        f"{url!r} is not the full URL of an OTLP trace receiver; set it to one like "
        f'"{example.replace("collector", host)}" ({other})'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryHandle:
    """Handle to the set-up made by `configure`. Without a provider nothing is recorded, and without a file what is
    recorded is dropped."""

    provider: SpanRecorder | None
    file: SpanFile | None = None

    def tracer(self, name: str) -> Tracer:
        """Return a tracer of this set-up, even if the set-up is not installed globally."""
        return self.provider.get_tracer(name) if self.provider else trace.NoOpTracer()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Write the queued spans; return False if that takes too long."""
        return self.file is None or self.file.flush(timeout_s)

    def shutdown(self) -> None:
        """Write the queued spans and stop, within the time that a disk gets to answer. Idempotent."""
        if self.file is not None:
            self.file.shutdown()


def configure(
    config: TelemetryConfig,
    *,
    process: str,
    spans_dir: Path | None,
    run_id: str = "",
    install: bool = True,
) -> TelemetryHandle:
    """Set up tracing in this process: spans go to `spans_dir/<process>.jsonl`.

    `run_id` names the run in the spans' resource and in the trace ids of its rollouts. With `install`, it becomes the
    global provider, which a process can set only once. Raises OSError if the directory cannot be created.
    """
    if not config.enabled:
        return TelemetryHandle(provider=None)
    resource = {
        "service.name": "headrace",
        "service.instance.id": process,
        "host.name": socket.gethostname(),
        span_names.RUN_ID: run_id,
        span_names.RECIPE: config.recipe,
    }
    file = None
    if spans_dir is not None:
        spans_dir.mkdir(parents=True, exist_ok=True)
        file = SpanFile(
            spans_dir / f"{process}{SUFFIX}",
            resource,
            max_file_bytes=config.max_file_bytes,
            max_queue_spans=config.max_queue_spans,
            interval_s=config.flush_interval_s,
        )
    provider = SpanRecorder(_dropped if file is None else file.add, run_id=run_id, resource=resource)
    if install:
        trace.set_tracer_provider(provider)
    return TelemetryHandle(provider=provider, file=file)


def _dropped(span: RecordedSpan) -> None:
    """Take a span that nobody reads."""
