"""The metrics of one run as text for Prometheus.

Invariants:
- Everything is computed from the files of the run's directory, which are only read: no process of the run knows of it,
  and a new exposition of the same files has the same counts.
- After the first reading, each one reads what is new.
- A ledger that cannot be read costs its own metrics; `headrace_ledger_readable` is then 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from headrace.actors.record.files.run_directory import RunDirectory, identity_of
from headrace.actors.runtime.version import RUNNING
from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.counts import Counts
from headrace.actors.telemetry.prometheus.gauges import (
    OF_RECORDS,
    add_disks,
    add_engines,
    add_lost_spans,
    add_records,
    add_running,
)
from headrace.actors.telemetry.prometheus.ledger_reader import LedgerReader
from headrace.serve.tracing.retention import Tail

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class NewestRecords:
    """Newest record of each of some kinds in a run's `metrics.jsonl`, read as they are written. A line that is not a
    record is counted in `bad_lines` and skipped. Of the older files only the newest is read at first: gauges need the
    newest records, and a run may keep a gigabyte."""

    def __init__(self, path: Path, kinds: Collection[str]) -> None:
        self._tail, self._kinds = Tail(path, newest=2), frozenset(kinds)
        self.newest: dict[str, dict[str, Any]] = {}
        self.bad_lines = 0

    def update(self) -> None:
        """Read what was written since the last call; at first, the newest two files. Raises OSError."""
        for line in self._tail.lines():
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
                self.bad_lines += 1
            elif record["kind"] in self._kinds:
                self.newest[record["kind"]] = record


logger = logging.getLogger(__name__)

OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN: Final = CONTENT_TYPE_PLAIN_0_0_4


def prefers_openmetrics(accept: str) -> bool:
    """Return whether a request's header `Accept` names OpenMetrics, as Prometheus does by default."""
    return any(each.partition(";")[0].strip().lower() == "application/openmetrics-text" for each in accept.split(","))


class Exposition:
    """Metrics of a run. Its calls block on files, and one may run at a time."""

    def __init__(self, directory: RunDirectory, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix time in seconds."""
        self._directory, self._clock = directory, clock
        self._records = NewestRecords(directory.metrics, OF_RECORDS)
        self._ledger = LedgerReader(directory.path)

    def render(self, *, openmetrics: bool) -> bytes:
        """Read what is new, and return the text in OpenMetrics, or in the plain format, which has no exemplars."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(list(self.families())))
        if openmetrics:
            return generate_openmetrics(registry)  # type: ignore[no-untyped-call, no-any-return]
        return generate_latest(registry)

    def families(self) -> Iterator[Metric]:
        """Read what is new, and yield the metrics."""
        began_s, now_s = time.monotonic(), self._clock()
        self._ledger.update()
        gauges = Counts()
        try:
            self._records.update()
        except OSError as error:
            logger.warning("%s cannot be read (%s); its metrics stay as they were", self._directory.metrics, error)
        add_records(gauges, self._records.newest)
        driven = self._directory.is_driven()
        add_running(gauges, self._directory, self._ledger.counts, driven=driven, now_s=now_s)
        add_engines(gauges, self._directory)
        add_lost_spans(gauges, self._directory)
        add_disks(gauges, self._directory)
        gauges.set(table.RUN, identity_of(self._directory), self._directory.path.name, RUNNING, to=1)
        gauges.set(table.DRIVEN, to=float(driven))
        gauges.set(table.LEDGER_READABLE, to=float(self._ledger.counts is not None))
        gauges.set(table.BAD_LINES, to=self._records.bad_lines)
        gauges.set(table.READ_S, to=time.monotonic() - began_s)
        yield from gauges.families()
        if self._ledger.counts is not None:
            yield from self._ledger.state.families()
            yield from self._ledger.counts.counts.families()


class _Families(Collector):
    """Collector of metrics that were computed before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return the metrics."""
        return self._families
