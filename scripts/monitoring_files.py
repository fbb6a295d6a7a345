"""Writes the files for Prometheus and Grafana from the rules, alerts and dashboards of scripts/monitoring, which name
metrics of `headrace.actors.telemetry.prometheus`.

Usage: scripts/generate monitoring --out DIR
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import yaml
from monitoring.dashboards import DASHBOARDS, Dashboard, Panel
from monitoring.rules import ALERTS, RECORDINGS, Alert, Series

PROMETHEUS: Final = """# An example: docs/monitoring.md.
global:
  scrape_interval: 15s
  evaluation_interval: 15s
rule_files:
  - rules.yml
scrape_configs:
  - job_name: headrace
    metrics_path: /metrics
    # The token of the page (`--key-file`, `telemetry.page_key_file`), which it needs.
    # authorization:
    #   credentials_file: /etc/prometheus/headrace.token
    static_configs:
      # One address for each run.
      - targets: ["127.0.0.1:8086"]
"""
COLUMNS: Final = 2
WIDTH: Final = 24 // COLUMNS
HEIGHT: Final = 8
DATA_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def rules() -> dict[str, Any]:
    """Return the file of rules."""
    recording = [{"record": rule.name, "expr": rule.query} for rule in RECORDINGS]
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.query,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "advice": alert.advice},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "headrace-recorded", "rules": recording}, {"name": "headrace-alerts", "rules": alerts}]}


def rule_test(alert: Alert, series: tuple[Series, ...], *, fires: bool) -> dict[str, Any]:
    """Return promtool's test that an alert fires, or that it never does."""
    given = []
    for each in series:
        name, _, labels = each.sample.partition("{")
        both = ",".join(filter(None, ['job="headrace",instance="run-1"', labels.removesuffix("}")]))
        given.append({"series": f"{name}{{{both}}}", "values": each.values})
    minutes = [alert.after_minutes] if fires else range(5, 90, 5)
    labels = {"severity": alert.severity, "job": "headrace", "instance": "run-1", **alert.labels}
    annotations = {"summary": alert.told, "advice": alert.advice}
    expected: list[dict[str, Any]] = [{"exp_labels": labels, "exp_annotations": annotations}] if fires else []
    return {
        "interval": "1m",
        "input_series": given,
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert.name, "exp_alerts": expected} for minute in minutes
        ],
    }


def rule_tests() -> dict[str, Any]:
    """Return promtool's tests: each alert fires on its series, and not on those that look similar."""
    tests = [rule_test(alert, alert.firing, fires=True) for alert in ALERTS]
    tests += [rule_test(alert, alert.quiet, fires=False) for alert in ALERTS]
    return {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}


def panel_document(panel: Panel, number: int) -> dict[str, Any]:
    """Return a panel as Grafana reads it."""
    place = number - 1
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATA_SOURCE,
            "expr": query.text,
            "legendFormat": query.legend or "__auto",
            "exemplar": panel.exemplars,
            "format": "table" if panel.kind == "table" else "time_series",
            "instant": panel.kind == "table",
            "range": panel.kind != "table",
        }
        for index, query in enumerate(panel.queries)
    ]
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking} if panel.kind == "timeseries" else {}
    return {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": DATA_SOURCE,
        "gridPos": {"x": place % COLUMNS * WIDTH, "y": place // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": targets,
    }


def dashboard_document(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    instance = {
        "name": "instance",
        "label": "run",
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": "label_values(headrace_run_info, instance)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
    }
    return {
        "uid": f"headrace-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["headrace"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, instance]},
        "panels": [panel_document(panel, number) for number, panel in enumerate(dashboard.panels, start=1)],
    }


def write(folder: Path) -> list[Path]:
    """Write the files into a folder, which is made if it is missing; return their paths. Raises OSError."""
    texts = {"prometheus.yml": PROMETHEUS}
    for name, document in (("rules.yml", rules()), ("rules_test.yml", rule_tests())):
        texts[name] = yaml.safe_dump(document, sort_keys=False, width=1000)
    for dashboard in DASHBOARDS:
        texts[f"grafana/{dashboard.name}.json"] = json.dumps(dashboard_document(dashboard), indent=1) + "\n"
    (folder / "grafana").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
