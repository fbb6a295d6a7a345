"""Set-up of tracing in a process of the service: OpenTelemetry's SDK, whose spans go to a file of the process.

Invariants:
- Spans go to files only (span_files.py): ending one never blocks, and no receiver can delay a process. What an
  OpenTelemetry collector gets is chosen from the files by the observer of the run. (The OTLP exporters also draw their
  back-off from the module `random`, whose state a learner saves.)
- Root spans started by `tracing.start_rollout_span` get the ids derived from the run and their attempt.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Tracer
from pydantic import Field, model_validator

from headrace.buffer.primitives.sections import Section
from headrace.serve.tracing import span_names
from headrace.serve.tracing.foreign_spans import SpanIntake
from headrace.serve.tracing.span_files import SUFFIX, SpanFile, SpanQueue
from headrace.serve.tracing.tracing import root_attempt, root_span_id_for, trace_id_for

OtlpProtocol: TypeAlias = Literal["http/protobuf", "grpc"]
"""Names of OTEL_EXPORTER_OTLP_PROTOCOL (https://opentelemetry.io/docs/specs/otel/protocol/exporter/)."""
EXAMPLES: Final[dict[OtlpProtocol, str]] = {
    "http/protobuf": "http://collector:4318/v1/traces",
    "grpc": "http://collector:4317",
}
LIMITS: Final = SpanLimits(
    max_span_attributes=64,
    max_events=16,
    # A step links to each member of its batch.
    max_links=8192,
    max_event_attributes=64,
    max_link_attributes=64,
    max_attribute_length=span_names.MAX_TEXT_CHARACTERS,
)
"""Limits on a span; a span counts what is dropped beyond them."""
_OF_RUN: Final = (span_names.RUN_ID, span_names.RECIPE, span_names.PROJECT)
END_S: Final = 5.0
"""Time that the end of a process waits for a disk that does not answer."""


class TelemetrySection(Section):
    """Destinations and limits of spans that a recipe has in `[telemetry]`."""

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
    removed, and those of slow and failed rollouts last. The other records of a run have limits in proportion: metrics
    the same, each log a quarter, the conversations and patches of finished evaluations eight times as much."""

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        if self.page is not None:
            host, _, port = self.page.rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise ValueError(f'page = {self.page!r} is no address; set it to one like "127.0.0.1:8787"')
        if self.otlp_endpoint is not None:
            check_receiver(self.otlp_endpoint, self.otlp_protocol)
        return self


class TelemetryConfig(TelemetrySection):
    """All settings of spans."""

    max_file_bytes: int = Field(default=8 * 2**20, ge=4096)
    """Size at which a span file is ended and compressed."""
    max_queue_spans: int = Field(default=16384, ge=512)
    """Largest number of spans of a process that wait to be written; further ones are lost, and counted."""
    flush_interval_s: float = Field(default=1.0, gt=0)
    """Longest time that an ended span stays in memory before it is written."""


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


class AttemptIds(IdGenerator):
    """Ids of spans: those of an attempt's root span are derived from the run and the attempt, all others random."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        # The module's numbers have a state that a resumed learner restores: its steps would get the ids of those that
        # were undone, and tracing would change what training draws. Seeded by the operating system; asking that for
        # each id costs ten times as much.
        self._bits = random.Random().getrandbits

    def generate_trace_id(self) -> int:
        attempt = root_attempt.get()
        return (self._bits(128) or 1) if attempt is None else trace_id_for(self._run_id, *attempt)

    def generate_span_id(self) -> int:
        attempt = root_attempt.get()
        return (self._bits(64) or 1) if attempt is None else root_span_id_for(self._run_id, *attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryHandle:
    """Handle to the set-up made by `configure`. Without a provider nothing is recorded, and without a file what is
    recorded is dropped."""

    provider: TracerProvider | None
    file: SpanFile | None = None

    def tracer(self, name: str) -> Tracer:
        """Return a tracer of this set-up, even if the set-up is not installed globally."""
        return self.provider.get_tracer(name) if self.provider else trace.NoOpTracer()

    def flush(self, timeout_s: float = END_S) -> bool:
        """Write the spans that have ended; return False if the disk does not take them, or not in time."""
        if self.provider is None or self.file is None:
            return True
        ended = self.file.admitted
        # The SDK exports in the caller's thread, however long that takes.
        exporting = Thread(target=self._export, name="span-flush", daemon=True)
        exporting.start()
        exporting.join(timeout_s)
        return self.file.done >= ended

    def intake(self) -> SpanIntake | None:
        """Return an intake that writes other programs' spans to this process's file; None if there is no file."""
        if self.provider is None or self.file is None:
            return None
        named = self.provider.resource.attributes
        return SpanIntake(self.file, {key: named[key] for key in _OF_RUN})

    def _export(self) -> None:
        assert self.provider is not None
        assert self.file is not None
        self.provider.force_flush()
        # For lines of an earlier failure: without new spans the SDK does not call its exporter.
        self.file.force_flush()

    def shutdown(self) -> None:
        """Write the spans that have ended and stop, within the time that a disk gets to answer. Idempotent."""
        if self.provider is None or self.file is None:
            return
        self.file.end()
        stopping = Thread(target=self.provider.shutdown, name="span-end", daemon=True)
        stopping.start()
        stopping.join(END_S)


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
    resource = Resource.create(
        {
            "service.name": "headrace",
            "service.instance.id": process,
            "host.name": socket.gethostname(),
            span_names.RUN_ID: run_id,
            span_names.RECIPE: config.recipe,
            span_names.PROJECT: run_id or "headrace",
        }
    )
    provider = TracerProvider(
        sampler=ParentBased(ALWAYS_ON),
        resource=resource,
        shutdown_on_exit=False,
        id_generator=AttemptIds(run_id),
        span_limits=LIMITS,
    )
    file = None
    if spans_dir is not None:
        spans_dir.mkdir(parents=True, exist_ok=True)
        file = SpanFile(
            spans_dir / f"{process}{SUFFIX}",
            resource.attributes,
            max_file_bytes=config.max_file_bytes,
            max_queue_spans=config.max_queue_spans,
        )
        provider.add_span_processor(SpanQueue(file, interval_s=config.flush_interval_s))
    if install:
        trace.set_tracer_provider(provider)
    return TelemetryHandle(provider=provider, file=file)
