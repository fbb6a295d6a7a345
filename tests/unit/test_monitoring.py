"""The files of scripts/monitoring: up to date, over metrics that exist, and accepted by promtool."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from monitoring.dashboards import DASHBOARDS
from monitoring.rules import ALERTS, RECORDINGS

from headrace.actors.telemetry.prometheus import table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts" / "monitoring"
QUERIES = [
    *(rule.query for rule in (*RECORDINGS, *ALERTS)),
    *(query.text for board in DASHBOARDS for panel in board.panels for query in panel.queries),
]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on PATH (Debian's package prometheus has it)"
)


def named(queries: list[str]) -> set[str]:
    """Return the names of metrics and of recorded series in queries."""
    return set(
        re.findall(r"\b(?:run:)?(?:headrace|gen_ai)_\w+(?::\w+)?", re.sub(r"by \([^)]*\)", "", " ".join(queries)))
    )


def test_the_files_match_the_definitions() -> None:
    for path, text in runpy.run_path(str(ROOT / "scripts" / "monitoring_files.py"))["render"]().items():
        assert path.read_text() == text, "run scripts/monitoring_files.py"


def test_queries_name_metrics_that_are_exported_and_every_metric_is_used() -> None:
    known = {sample for metric in table.TABLE for sample in metric.samples}
    recorded = {rule.name for rule in RECORDINGS}
    used = named(QUERIES)
    assert used - known - recorded == set()
    assert [metric.name for metric in table.TABLE if used.isdisjoint(metric.samples)] == []


def test_there_are_six_alerts_and_three_dashboards_with_advice_and_titles() -> None:
    assert len({alert.name for alert in ALERTS}) == 6
    assert all(alert.summary and alert.advice for alert in ALERTS)
    boards = [json.loads(path.read_text()) for path in sorted((FOLDER / "grafana").iterdir())]
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
def test_promtool_accepts_the_files_and_each_alert_fires_on_its_series_only(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
