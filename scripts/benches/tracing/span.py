"""The cost of one span: that of the recorder, file included, beside that of the SDK's without a file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import Tracer
from opentelemetry.util.types import AttributeValue

from headrace.serve.tracing.recorder import RecordedSpan, SpanRecorder
from headrace.serve.tracing.span_files import line_of

ROUNDS: Final = 15
SPANS: Final = 2000
ATTRIBUTES: Final[Mapping[str, AttributeValue]] = {"headrace.rollout.id": "r000123", "headrace.rollout.attempt": 1}


class _Queue(SpanProcessor):
    """Takes ended spans, as the recorder's file does."""

    def __init__(self) -> None:
        self.spans: deque[ReadableSpan] = deque()

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def measure_span() -> dict[str, float]:
    """Return the microseconds of CPU of a span with four attributes: medians over alternated rounds. `untraced_span_us`
    is what the code costs without tracing."""
    ended: deque[RecordedSpan] = deque()
    queue, sdk = _Queue(), TracerProvider(shutdown_on_exit=False)
    sdk.add_span_processor(queue)
    recorder = SpanRecorder(ended.append, run_id="bench")
    own_us, file_us, sdk_us, none_us = [], [], [], []
    for _ in range(ROUNDS):
        own_us.append(_microseconds(recorder))
        began_s = time.process_time()
        for span in ended:
            line_of(span)
        file_us.append((time.process_time() - began_s) * 1e6 / SPANS)
        sdk_us.append(_microseconds(sdk.get_tracer("bench")))
        none_us.append(_microseconds(trace.NoOpTracer()))
        ended.clear()
        queue.spans.clear()
    span_us, sdk_span_us = median(own_us) + median(file_us), median(sdk_us)
    return {
        "span_us": span_us,
        "sdk_span_us": sdk_span_us,
        "untraced_span_us": median(none_us),
        "span_over_sdk": span_us / sdk_span_us,
    }


def _microseconds(tracer: Tracer) -> float:
    began_s = time.process_time()
    for _ in range(SPANS):
        with tracer.start_as_current_span("tool", attributes=ATTRIBUTES) as span:
            span.set_attribute("exit_code", 0)
            span.set_attribute("truncated", value=False)
    return (time.process_time() - began_s) * 1e6 / SPANS
