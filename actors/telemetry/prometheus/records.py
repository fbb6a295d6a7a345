"""Gauges of the newest record of each kind in a run's `metrics.jsonl`, by one rule.

Invariants:
- The field FIELD of a record of kind KIND is the gauge `headrace_KIND_FIELD`, with `_seconds` for a final `_s`; the
  time of the record is `headrace_KIND_timestamp_seconds`. True is 1. Each number of an object has its key as the label
  `name`; that of an object of objects, the labels `name` and `field`. A list of names gives their number. Other values
  give no gauge.
- The number of series is bounded; `left_out` counts the values that have none, because the limit is reached or two
  values would have one series.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.actors.telemetry.prometheus.series import plain_value
from headrace.actors.telemetry.prometheus.table import TABLE
from headrace.serve.tracing.retention import Tail

MAX_KINDS: Final = 64
MAX_SERIES: Final = 2000
"""Largest number of series of all records: fifty stations, services and sources each have fewer."""
LABELS: Final = ("name", "field")
_TAKEN: Final = frozenset(sample for metric in TABLE for sample in (metric.name, *metric.samples))
_STRANGE: Final = re.compile(r"[^a-zA-Z0-9_]")


class NewestRecords(Collector):
    """Newest record of each kind, read as they are written. A line that is not a record, or of a kind beyond the first
    `MAX_KINDS`, is counted in `bad_lines` and skipped. Of the older files only the newest is read at first: gauges need
    the newest records, and a run may keep a gigabyte."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, newest=2)
        self.newest: dict[str, dict[str, Any]] = {}
        self.bad_lines = 0
        self.left_out = 0

    def update(self) -> None:
        """Read what was written since the last call; at first, the newest two files. Raises OSError."""
        for line in self._tail.lines():
            try:
                record = orjson.loads(line)
                kind = record["kind"]
            except (orjson.JSONDecodeError, LookupError, TypeError):
                kind = None
            if isinstance(kind, str) and (kind in self.newest or len(self.newest) < MAX_KINDS):
                self.newest[kind] = record
            else:
                self.bad_lines += 1

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; `left_out` is then up to date."""
        self.left_out, left, names = 0, MAX_SERIES, set(_TAKEN)
        for kind, record in sorted(self.newest.items()):
            for field, value in record.items():
                found, name = list(numbers_of(value)), name_of(kind, field)
                kept = {} if name in names else dict(found[:left])
                self.left_out += len(found) - len(kept)
                if kept:
                    names.add(name)
                    left -= len(kept)
                    text = f"`{plain_value(field)}` of the newest record `{plain_value(kind)}`."
                    family = GaugeMetricFamily(name, text, labels=LABELS[: max(map(len, kept))])
                    for path, number in kept.items():
                        family.add_metric(path, number)
                    yield family


def numbers_of(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers of a field, each with the values of its labels."""
    if isinstance(value, int | float):
        yield path, float(value)
    elif isinstance(value, list) and all(isinstance(each, str) for each in value):
        yield path, float(len(value))
    elif isinstance(value, dict) and len(path) < len(LABELS):
        for name, inner in value.items():
            yield from numbers_of(inner, (*path, plain_value(name)))


def name_of(kind: str, field: str) -> str:
    """Return the name of the gauge of a record's field."""
    field = "timestamp_s" if field == "time_s" else field
    field = f"{field[:-2]}_seconds" if field.endswith("_s") else field
    return _STRANGE.sub("_", f"headrace_{kind}_{field}")
