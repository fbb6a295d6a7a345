"""The page docs/metrics.md from the metric records, every kind with its keys and their docstrings, and from the table
of exported metrics."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from generators.docstrings import docstrings
from headrace.actors.record.files.metrics import METRICS, BatchPart, Metric, StationMeans
from headrace.actors.record.files.service_totals import ServiceTotals
from headrace.actors.telemetry.prometheus.series import MAX_VALUES
from headrace.actors.telemetry.prometheus.table import TABLE, Exported
from headrace.buffer.trajectories.types import TokenRatios

PATH = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

A run appends its measurements to `metrics.jsonl` in its directory, one JSON object a line. Every line has `kind` and
`time_s` (Unix time); the other keys depend on the kind and are listed below. Older lines are in
`metrics-000001.jsonl`, `metrics-000002.jsonl`, ..., oldest first; `telemetry.keep_bytes`
([configuration.md](configuration.md)) says how much is kept. Readers should ignore unknown kinds and keys: new versions
add some. What must survive is in the ledger ([run_directory.md](run_directory.md)).

```python
from pathlib import Path
from typing import Any
from headrace.actors.record.files.metrics import read_metrics

steps = read_metrics(Path("runs/quickstart-1/metrics.jsonl"), ("step",))
print([round(step["reward"], 2) for step in steps])
```

To add a key or a kind, change the dataclass in `actors/record/files/metrics.py` and the place that fills it, and run
`scripts/generate metrics`, which writes this page. What Prometheus gets is [below](#exported-metrics).
"""
EXPORTED = f"""## Exported metrics

`/metrics` of a run's page ([monitoring.md](monitoring.md)) has these metrics, in OpenMetrics or the plain format of
Prometheus.

### Gauges of records

Each number of the newest record of each kind above is a gauge by one rule: `headrace_KIND_FIELD`, with `_seconds` for a
final `_s`, and `headrace_KIND_timestamp_seconds` for `time_s`. True is 1. An object of numbers gives a series for each
key, which is the label `name`; an object of objects has the labels `name` and `field`. A list of names is their number.
Texts, nulls and other lists give no gauge. Examples:

| record | gauge |
|---|---|
| `push`, `total_s` | `headrace_push_total_seconds` |
| `push`, `seconds` | `headrace_push_seconds{{name="broadcast"}}` |
| `push`, `quarantined` | `headrace_push_quarantined` |
| `stations`, `stations` | `headrace_stations_stations{{name="learner",field="in_use"}}` |
| `step`, `loss` of the learner's keys | `headrace_step_loss` |

### Other metrics

Counters end with `_total`; a histogram has `_bucket`, `_sum` and `_count`. Counters and histograms come from files that
keep their totals, so that neither a restart nor the removal of old files changes a count. A label has at most
{MAX_VALUES} values: the rest is summed into `other`. Buckets have the newest trace as an exemplar. The table is
`actors/telemetry/prometheus/table.py`.

| metric | type | labels | source | meaning |
|---|---|---|---|---|
"""


def rows(record: type) -> list[str]:
    """Return the table rows of a dataclass."""
    texts = docstrings(record)
    keys = {item.name: "(further keys)" if "inline" in item.metadata else f"`{item.name}`" for item in fields(record)}
    return [f"| {key} | {texts[name]} |" for name, key in keys.items()]


def section(record: type[Metric]) -> list[str]:
    """Return the heading, the description and the table of one kind."""
    title = record.kind if record.__name__ != "SimulatedPushMetric" else f"{record.kind} (simulated engines)"
    about = " ".join((record.__doc__ or "").split())
    return [f"## {title}", "", about, "", "| key | meaning |", "|---|---|", *rows(record), ""]


def exported(metric: Exported[Any]) -> str:
    """Return the table row of an exported metric."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    name, kind = metric.name if metric.buckets else metric.sample, metric.type.__name__.lower()
    return f"| `{name}` | {kind} | {labels} | {metric.source} | {metric.help} |"


def render() -> dict[Path, str]:
    """Return the page by its path."""
    nested: dict[str, tuple[tuple[str, type], ...]] = {
        "step": (
            ("`mismatch`, `stale_kv` and one entry of `ratio_by_staleness`", TokenRatios),
            ("One entry of `sources` and `families`", BatchPart),
        ),
        "stations": (("One entry of `stations`", StationMeans),),
        "services": (("One entry of `services`", ServiceTotals),),
    }
    lines = []
    for record in METRICS:
        lines += section(record)
        for title, entry in nested.get(record.kind, ()):
            lines += [f"### {title}", "", "| key | meaning |", "|---|---|", *rows(entry), ""]
    return {PATH: HEAD + "\n" + "\n".join(lines) + "\n" + EXPORTED + "\n".join(map(exported, TABLE)) + "\n"}
