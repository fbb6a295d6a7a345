"""Values of exported metrics in memory, with a bound on the values of each label.

Invariants:
- The first values of a label keep their names, in the order in which they come; later ones count as `OTHER_VALUE`. So
  the same observations in the same order give the same output, and a million values take no more memory than fifty.
- Counters and sums are exact in millionths, so they do not depend on the order of what was added: a counter that is
  lower by a rounding error after a restart would count as a reset.
- A bucket of a histogram keeps one exemplar, the newest by its own time, whatever the order of the observations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from headrace.actors.telemetry.prometheus.table import (
    MAX_CHARACTERS,
    MAX_VALUES,
    OTHER_VALUE,
    TABLE,
    Exported,
    MetricType,
)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MILLION: Final = 1_000_000
UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True)
class _Histogram:
    """Observations of one series: number by bucket, sum in millionths, and per bucket the exemplar's time, trace id and
    value."""

    numbers: list[int]
    total: int = 0
    exemplars: dict[int, tuple[float, str, float]] = field(default_factory=dict)


class Counts:
    """Values by metric and labels. `reserved` are values of labels that are never summed into others."""

    def __init__(self, reserved: Mapping[str, Iterable[str]] | None = None) -> None:
        self._reserved = {label: tuple(values) for label, values in (reserved or {}).items()}
        self._known: dict[tuple[str, str], set[str]] = {}
        self._keys: defaultdict[str, dict[tuple[object, ...], tuple[str, ...]]] = defaultdict(dict)
        self._totals: defaultdict[str, dict[tuple[str, ...], int]] = defaultdict(dict)
        self._values: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        self._histograms: defaultdict[str, dict[tuple[str, ...], _Histogram]] = defaultdict(dict)

    def add(self, metric: Exported, *labels: object, by: float = 1.0) -> None:
        """Add to a counter, or to a gauge that sums what has equal labels."""
        key, totals = self._key(metric, labels), self._totals[metric.name]
        totals[key] = totals.get(key, 0) + round(by * MILLION)

    def set(self, metric: Exported, *labels: object, to: float) -> None:
        """Set a gauge. Values beyond the limit of a label replace each other: use `add` for what may have many."""
        self._values[metric.name][self._key(metric, labels)] = to

    def observe(self, metric: Exported, *labels: object, value: float, trace_id: str = "", at_s: float = 0.0) -> None:
        """Add an observation to a histogram, with its trace and time (Unix seconds) if it may serve as an exemplar."""
        series = self._histograms[metric.name]
        key = self._key(metric, labels)
        if (histogram := series.get(key)) is None:
            histogram = series[key] = _Histogram([0] * (len(metric.buckets) + 1))
        bucket = bisect_left(metric.buckets, value)
        histogram.numbers[bucket] += 1
        histogram.total += round(value * MILLION)
        if trace_id and (at_s, trace_id) >= histogram.exemplars.get(bucket, (at_s, trace_id))[:2]:
            histogram.exemplars[bucket] = at_s, trace_id, value

    def families(self) -> Iterator[Metric]:
        """Yield the metrics that have values, in the order of the table."""
        for metric in TABLE:
            totals = {key: total / MILLION for key, total in self._totals.get(metric.name, {}).items()}
            values = totals | self._values.get(metric.name, {})
            series = self._histograms.get(metric.name)
            if metric.type is MetricType.INFO and values:
                info = InfoMetricFamily(metric.name, metric.help)
                for key in values:
                    info.add_metric((), dict(zip(metric.labels, key, strict=True)))
                yield info
            elif series:
                family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
                for key, histogram in series.items():
                    family.add_metric(key, buckets_of(metric, histogram), histogram.total / MILLION)
                yield family
            elif values:
                kind = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
                plain = kind(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
                for key, value in values.items():
                    plain.add_metric(key, value)
                yield plain

    def _key(self, metric: Exported, labels: tuple[object, ...]) -> tuple[str, ...]:
        keys = self._keys[metric.name]
        if (found := keys.get(labels)) is not None:
            return found
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {labels}")
        values, full = [], False
        for label, value in zip(metric.labels, labels, strict=True):
            text = plain_value(str(value))
            known = self._known.get((metric.name, label))
            if known is None:
                known = self._known[metric.name, label] = set(self._reserved.get(label, ()))
            if text not in known and len(known) >= MAX_VALUES - 1:
                text, full = OTHER_VALUE, True
            else:
                known.add(text)
            values.append(text)
        key = tuple(values)
        # Only what keeps its name is remembered, of which there is little. Long names are many for one value.
        if not full and key == labels:
            keys[labels] = key
        return key


def buckets_of(metric: Exported, histogram: _Histogram) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return the upper bounds of a histogram, with the number of observations up to each, and exemplars."""
    found: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    bounds = (*map(floatToGoString, metric.buckets), "+Inf")
    for place, (bound, number) in enumerate(zip(bounds, accumulate(histogram.numbers), strict=True)):
        if known := histogram.exemplars.get(place):
            found.append((bound, number, Exemplar({"trace_id": known[1]}, known[2], known[0])))
        else:
            found.append((bound, number))
    return found


def plain_value(text: str) -> str:
    """Return a value without the characters that end a line or a file for some parsers, cut to its maximum length."""
    text = text[:MAX_CHARACTERS]
    return text if text.isprintable() else "".join(each if each.isprintable() else UNPRINTABLE for each in text)
