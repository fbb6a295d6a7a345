"""Metrics of a run as a scrape finds them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest
from aiohttp import web
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.telemetry.prometheus.exposition import PATH, Exposition, metrics_handler

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
"""Header Accept of a scrape that takes OpenMetrics."""
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on PATH (Debian's package prometheus has it)"
)
CHANGING = ("headrace_read_seconds", "headrace_disk_", "headrace_oldest_rollout_seconds", "headrace_stuck_rollouts")
"""Gauges that differ between two scrapes of the same files."""


def samples_of(exposition: Exposition) -> list[Sample]:
    """Return the samples of one scrape, parsed from OpenMetrics."""
    text = exposition.render(OPENMETRICS)[0].decode()
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return [sample for family in families for sample in family.samples]


def scraped(exposition: Exposition) -> dict[Series, float]:
    """Return the values of one scrape by name and sorted labels."""
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples_of(exposition)}


def lasting(exposition: Exposition) -> dict[Series, float]:
    """Return the values of one scrape that another reader of the same files must find, too."""
    return {key: value for key, value in scraped(exposition).items() if not key[0].startswith(CHANGING)}


def fresh(run_dir: Path) -> Exposition:
    """Return an exposition that has read nothing yet, as after a restart."""
    return Exposition(RunDirectory.at(run_dir))


def by_label(values: dict[Series, float], name: str, label: str) -> dict[str, float]:
    """Return the sums of a metric's samples by the value of one label."""
    found: dict[str, float] = {}
    for (sample, labels), value in values.items():
        if sample == name:
            key = dict(labels).get(label, "")
            found[key] = found.get(key, 0.0) + value
    return found


def exposition_app(run_dir: Path) -> web.Application:
    """Return an application that serves the metrics of the run in `run_dir` at `PATH`."""
    app = web.Application()
    app.router.add_get(PATH, metrics_handler(Exposition(RunDirectory.at(run_dir))))
    return app


def refused_by_promtool(text: bytes) -> str:
    """Return what `promtool check metrics` has against a text in the plain format; nothing if it accepts it."""
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False, timeout=60)
    return (done.stdout + done.stderr).decode() if done.returncode else ""
