"""Telemetry of one actor: its spans go to a file of its own, and its records go to the run's metrics.

It is picklable, so that the driver can configure it and the actor's process can set it up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.actors.record.files.metrics import MetricsLog
from headrace.serve.tracing.retention import RetentionConfig
from headrace.serve.tracing.telemetry import TelemetryConfig, TelemetryHandle, configure


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorTelemetry:
    """Destination of an actor's spans and metrics; without `run_dir` nothing is written."""

    config: TelemetryConfig
    run_dir: Path | None
    run_id: str = ""
    """Identity of the run, which distinguishes its traces from those of other runs."""
    retention: RetentionConfig | None = None
    """Limits on the files; None to rotate and remove nothing."""

    @contextmanager
    def spans(self, process: str) -> Iterator[TelemetryHandle]:
        """Export this process's spans to `<run>/spans/<process>-<pid>.jsonl` until the context ends."""
        if self.run_dir is None:
            yield TelemetryHandle(provider=None)
            return
        spans_dir = self.run_dir / "spans"
        handle = configure(self.config, process=f"{process}-{os.getpid()}", spans_dir=spans_dir, run_id=self.run_id)
        try:
            yield handle
        finally:
            handle.shutdown()

    def metrics(self) -> MetricsLog:
        """Return the log of the run's `metrics.jsonl`."""
        return MetricsLog(None if self.run_dir is None else self.run_dir / "metrics.jsonl", self.retention)
