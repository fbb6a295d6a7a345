"""An OpenTelemetry collector, to which stored spans are sent over OTLP.

The SDK's exporters take spans of the SDK only; here the stored lines become the request. The exporters' settings from
the environment that concern access are honoured: OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE, also
with TRACES_ (https://opentelemetry.io/docs/specs/otel/protocol/exporter/).

Invariant: a span is sent with the ids and times that it was recorded with, so sending it again does not make it another
one.
"""

from __future__ import annotations

import gzip
import logging
import os
import ssl
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.util.re import parse_env_headers

from headrace.actors.errors import ConfigError
from headrace.serve.tracing.telemetry import EXAMPLES, OtlpProtocol, check_receiver

BATCH_SPANS: Final = 512
"""Spans in one request."""
EXPORT_S: Final = 10.0
"""Time that a collector gets for one request."""
_REFUSED_HTTP: Final = frozenset({400, 413, 422})
"""Answers that blame the request. After all others it is sent again: also after those that a collector gives to every
request while it is not set up (401, 404, 500)."""
_REFUSED_GRPC: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})

logger = logging.getLogger(__name__)


class Sent(Enum):
    """Result of a request."""

    TAKEN = "taken"
    LATER = "later"
    """The collector is away, slow, overloaded or not set up; the same request may succeed later."""
    REFUSED = "refused"
    """The collector does not take this request, now or later."""


class Receiver:
    """A collector at `url`. Blocking; one call at a time."""

    def __init__(self, url: str, protocol: OtlpProtocol) -> None:
        self.url = url
        self.rejected = 0
        """Spans that the collector rejected of requests that it took."""
        self._last = Sent.TAKEN
        headers, certificate = _setting("HEADERS"), _setting("CERTIFICATE")
        self._headers = parse_env_headers(headers, liberal=True) if headers else {}
        self._tls = ssl.create_default_context(cafile=certificate or None) if url.startswith("https") else None
        self._channel: grpc.Channel | None = None
        if protocol == "grpc":
            target = url.partition("://")[2].rstrip("/")
            if self._tls is not None:
                roots = Path(certificate).read_bytes() if certificate else None
                self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(roots))
            else:
                self._channel = grpc.insecure_channel(target)

    def send(self, spans: Collection[Mapping[str, Any]]) -> Sent:
        """Send stored spans, as `store.span_of` returns them, in one request, within about `EXPORT_S`."""
        by = self._by_http if self._channel is None else self._by_grpc
        try:
            sent, why = by(request_of(spans))
        except (ParseError, ValueError) as error:
            # A stored line of another program, such as one with an id that is not hexadecimal.
            sent, why = Sent.REFUSED, f"not OTLP: {error}"
        if sent is not Sent.TAKEN and sent is not self._last:
            again = "and is asked again" if sent is Sent.LATER else "for good"
            logger.warning("%s does not take %d spans, %s: %s", self.url, len(spans), again, why)
        self._last = sent
        return sent

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _by_http(self, request: ExportTraceServiceRequest) -> tuple[Sent, str]:
        headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip", **self._headers}
        body = gzip.compress(request.SerializeToString(), compresslevel=1)
        posted = urllib.request.Request(self.url, body, headers)
        try:
            with urllib.request.urlopen(posted, timeout=EXPORT_S, context=self._tls) as answer:
                self._take(ExportTraceServiceResponse.FromString(answer.read()))
        except urllib.error.HTTPError as error:
            sent = Sent.REFUSED if error.code in _REFUSED_HTTP else Sent.LATER
            return sent, f"status {error.code} {error.read(200).decode(errors='replace')}"
        except (OSError, HTTPException) as error:
            return Sent.LATER, str(error)
        except DecodeError:
            # An answer in JSON, or none of OTLP's: with status 200 the spans were taken.
            pass
        return Sent.TAKEN, ""

    def _by_grpc(self, request: ExportTraceServiceRequest) -> tuple[Sent, str]:
        stub = TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            self._take(stub.Export(request, timeout=EXPORT_S, metadata=tuple(self._headers.items())))
        except grpc.RpcError as error:
            code = error.code()
            return (Sent.REFUSED if code in _REFUSED_GRPC else Sent.LATER), f"{code} {error.details()}"
        return Sent.TAKEN, ""

    def _take(self, response: ExportTraceServiceResponse) -> None:
        if rejected := response.partial_success.rejected_spans:
            self.rejected += rejected
            logger.warning("%s rejects %d spans: %s", self.url, rejected, response.partial_success.error_message)


def request_of(spans: Iterable[Mapping[str, Any]]) -> ExportTraceServiceRequest:
    """Return the request with these stored spans; those of one process share a resource. Raises ParseError, ValueError
    for a span that is not OTLP."""
    groups: dict[int, dict[str, Any]] = {}
    for span in spans:
        # The reader gives all spans of a process one object.
        group = groups.setdefault(id(span["resource"]), {"resource": span["otlp"]["resource"], "scopeSpans": []})
        group["scopeSpans"] += [
            {**scope, "spans": [_with_bytes(each) for each in scope["spans"]]} for scope in span["otlp"]["scopeSpans"]
        ]
    # Fields of a later version of OTLP are not ours to refuse.
    document = {"resourceSpans": list(groups.values())}
    request: ExportTraceServiceRequest = ParseDict(document, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    return request


def _with_bytes(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return a span or link with its ids as protobuf's JSON has bytes; OTLP's own has them in hexadecimal."""
    ids = {
        name: b64encode(bytes.fromhex(span[name])).decode()
        for name in ("traceId", "spanId", "parentSpanId")
        if name in span
    }
    links = {"links": [_with_bytes(each) for each in span["links"]]} if "links" in span else {}
    return {**span, **ids, **links}


def _setting(name: str) -> str:
    """Return a setting of the OTLP exporters from the environment."""
    general = os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "") or general


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
        if receiver.send(batch) is not Sent.TAKEN:
            raise ConfigError(f"{url} does not take spans ({number} were sent before): is a collector running there?")
        number += len(batch)
    receiver.close()
    return number
