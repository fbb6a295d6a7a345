"""The cost of one span as a process of a run has it: the SDK, its queue, its line and the file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Tracer
from opentelemetry.util.types import AttributeValue

from headrace.serve.tracing.telemetry import TelemetryConfig, configure

ROUNDS: Final = 15
SPANS: Final = 2000
ATTRIBUTES: Final[Mapping[str, AttributeValue]] = {"headrace.rollout.id": "r000123", "headrace.rollout.attempt": 1}


def measure_span() -> dict[str, float]:
    """Return the microseconds of CPU of a span with four attributes, until it is in its file: medians over alternated
    rounds. `untraced_span_us` is what the code costs without tracing."""
    traced_us, none_us = [], []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        telemetry = configure(TelemetryConfig(), process="bench", spans_dir=Path(folder), install=False)
        tracer = telemetry.tracer("bench")
        for _ in range(ROUNDS):
            began_s = time.process_time()
            _end_spans(tracer)
            assert telemetry.flush()
            traced_us.append((time.process_time() - began_s) * 1e6 / SPANS)
            began_s = time.process_time()
            _end_spans(trace.NoOpTracer())
            none_us.append((time.process_time() - began_s) * 1e6 / SPANS)
        telemetry.shutdown()
    return {"span_us": median(traced_us), "untraced_span_us": median(none_us)}


def _end_spans(tracer: Tracer) -> None:
    for _ in range(SPANS):
        with tracer.start_as_current_span("execute_tool", attributes=ATTRIBUTES) as span:
            span.set_attribute("exit_code", 0)
            span.set_attribute("truncated", value=False)
