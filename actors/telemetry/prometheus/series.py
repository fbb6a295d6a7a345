"""Metrics of prometheus_client in a registry of their own, with a bound on the values of each label.

Invariant: the first values of a label keep their names, in the order in which they come; later ones count as
`OTHER_VALUE`. So the same observations in the same order give the same series, and a million values take no more memory
than fifty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry

from headrace.actors.telemetry.prometheus.table import Exported, M

MAX_VALUES: Final = 50
"""Largest number of values of a label, `OTHER_VALUE` included."""
OTHER_VALUE: Final = "other"
"""Value of a label into which the values beyond the first `MAX_VALUES - 1` are summed."""
MAX_CHARACTERS: Final = 80
"""Length to which a value of a label is cut."""
UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"


class Series:
    """Metrics by their entries of the table; each exists from its first use. `reserved` are values of labels that keep
    their names whatever comes before them."""

    def __init__(self, reserved: Mapping[str, Iterable[str]] | None = None) -> None:
        self.registry = CollectorRegistry()
        self._reserved = reserved or {}
        self._metrics: dict[str, Any] = {}
        self._known: dict[tuple[str, str], set[str]] = {}
        self._found: dict[tuple[str, ...], Any] = {}

    def of(self, metric: Exported[M], *labels: str) -> M:
        """Return the counter, gauge or histogram of a metric with these values of its labels."""
        key = (metric.series, *labels)
        if (found := self._found.get(key)) is not None:
            return found  # type: ignore[no-any-return]
        made = self._metrics.get(metric.name)
        if made is None:
            bounds: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            made = metric.type(metric.name, metric.help, metric.labels, registry=self.registry, **bounds)
            self._metrics[metric.name] = made
        pairs = zip(metric.labels, labels, strict=True)
        values = tuple(self._bounded(metric.name, label, value) for label, value in pairs)
        found = made.labels(*values) if values else made
        # Only what keeps its names is remembered, of which there is little.
        if values == labels:
            self._found[key] = found
        return found

    def _bounded(self, metric: str, label: str, value: str) -> str:
        known = self._known.get((metric, label))
        if known is None:
            known = self._known[metric, label] = {*self._reserved.get(label, ())}
        if value in known:
            return value
        value = plain_value(value)
        if value not in known and len(known) >= MAX_VALUES - 1:
            return OTHER_VALUE
        known.add(value)
        return value


def plain_value(text: str) -> str:
    """Return a value without the characters that end a line or a file for some parsers, cut to its maximum length."""
    text = text[:MAX_CHARACTERS]
    return text if text.isprintable() else "".join(each if each.isprintable() else UNPRINTABLE for each in text)
