"""The files that scripts/monitoring_files.py writes: over metrics that exist, and accepted by promtool."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from monitoring.dashboards import DASHBOARDS
from monitoring.rules import ALERTS, RECORDINGS

from headrace.actors.record.files.metrics import METRICS
from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.records import name_of
from support.scrapes import needs_promtool

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "monitoring_files.py"
QUERIES = [
    *(rule.query for rule in (*RECORDINGS, *ALERTS)),
    *(query.text for board in DASHBOARDS for panel in board.panels for query in panel.queries),
]
OF_RECORDS = {
    *(name_of(record.kind, field.name) for record in METRICS for field in fields(record)),
    *(name_of(record.kind, "time_s") for record in METRICS),
    # A key of the pacing, which the record takes in.
    name_of("stations", "rollout_limit"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files."""
    folder = tmp_path_factory.mktemp("monitoring") / "new"
    runpy.run_path(str(SCRIPT))["write"](folder)
    return folder


def named(queries: list[str]) -> set[str]:
    """Return the names of metrics and of recorded series in queries."""
    text = re.sub(r'by \([^)]*\)|"[^"]*"', "", " ".join(queries))
    return set(re.findall(r"\b(?:run:)?(?:headrace|gen_ai)_\w+(?::\w+)?", text))


def test_queries_name_metrics_that_are_exported_and_every_metric_of_the_table_is_used() -> None:
    known = {sample for metric in table.TABLE for sample in metric.samples}
    recorded = {rule.name for rule in RECORDINGS}
    used = named(QUERIES)
    assert used - known - recorded - OF_RECORDS == set()
    assert [metric.name for metric in table.TABLE if used.isdisjoint(metric.samples)] == []


def test_no_gauge_of_a_record_has_the_name_of_another_metric() -> None:
    assert OF_RECORDS.isdisjoint({name for metric in table.TABLE for name in (metric.name, *metric.samples)})


def test_there_are_six_alerts_and_three_dashboards_with_advice_and_titles(folder: Path) -> None:
    assert len({alert.name for alert in ALERTS}) == 6
    assert all(alert.summary and alert.advice for alert in ALERTS)
    boards = [json.loads(path.read_text()) for path in sorted((folder / "grafana").iterdir())]
    assert [board["uid"] for board in boards] == ["headrace-engines", "headrace-overview", "headrace-rollouts"]
    for board in boards:
        assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"]) > 10
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
        assert len(places) == len(board["panels"])


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [("check", "rules", "rules.yml"), ("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")],
)
def test_promtool_accepts_the_files_and_each_alert_fires_on_its_series_only(
    command: tuple[str, ...], folder: Path
) -> None:
    done = subprocess.run(["promtool", *command], cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@needs_promtool
def test_promtool_accepts_the_configuration_for_a_cluster_in_the_guide(tmp_path: Path) -> None:
    guide = (SCRIPT.parents[1] / "docs" / "monitoring.md").read_text()
    [text] = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "key").write_text("k")
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/headrace.key", str(tmp_path / "key")))
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
