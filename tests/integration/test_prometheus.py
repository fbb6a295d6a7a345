"""Prometheus scrapes a real run: every query of a panel and an alert has an answer, and exemplars lead to traces."""

from __future__ import annotations

import asyncio
import re
import runpy
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from aiohttp import ClientError, ClientSession
from monitoring.dashboards import DASHBOARDS
from monitoring.rules import ALERTS, RECORDINGS

from headrace.actors.cluster.runs.records import RunId
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.audit.verify import verify
from support.control_rig import ControlRig
from support.loopback import on_loopback
from support.observer_rig import simulated_run
from support.run_rig import run_simulated
from support.runs_without_services import RECIPE, serving
from support.scrapes import exposition_app, fresh, refused_by_promtool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not on PATH (Debian's package prometheus has it)"
    ),
]
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "monitoring_files.py"
QUICK = (
    "agent.simulated.durations.mean_s=0.6",
    "agent.simulated.durations.median_s=0.5",
    "agent.simulated.durations.cap_s=2",
    "learner.simulated.step_s=0.2",
    "engines.simulated.push_s=0.1",
    "buffer.batch_size=16",
    "buffer.group_size=4",
    "dispatcher.slots_per_worker=16",
    "training.steps=4",
    "training.save_every=2",
    "evaluation.tasks=2",
)
HANG_S = 90.0
IN_A_QUIET_RUN: Final = {
    table.OUTAGES.name: "no component failed",
    table.OUTAGE_OPEN.name: "no component failed",
    "headrace_stall_": "the run did not stall",
    "headrace_step_mismatch": "a simulated learner has no log-probabilities",
    "headrace_mismatch_alarm_": "a simulated learner has no log-probabilities",
    table.RUNNING.name: "the run is over",
    "headrace_stations_rollout_limit": "the recipe has no pacing",
    "headrace_services_": "the recipe has no services",
    table.ENGINE_STATE.name: "simulated engines have no members.json",
    table.ENGINE_REQUESTS.name: "simulated engines have no members.json",
    "headrace_push_seconds": "pushes to simulated engines have no phases",
    "headrace_push_sent_bytes": "pushes to simulated engines send nothing",
    "headrace_push_tokens_recomputed": "pushes to simulated engines recompute nothing",
    "headrace_push_quarantined": "simulated engines do not fail",
    "headrace_push_stall_share": "simulated engines have no gates",
}
"""Why metrics give no rows in this run, by the beginning of their names."""


@asynccontextmanager
async def prometheus(folder: Path, config: dict[str, Any]) -> AsyncIterator[str]:
    """The URL of a Prometheus with a configuration, that scrapes every two seconds."""
    config["global"] = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "500ms"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--enable-feature=exemplar-storage",
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(HANG_S):
            while (match := re.search(rb'"Listening on" address=(\S+)', await process.stderr.readline())) is None:
                assert process.returncode is None
        yield f"http://{match.group(1).decode()}"
    finally:
        process.terminate()
        await process.wait()


async def ask(session: ClientSession, url: str, route: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus' API."""
    async with session.get(f"{url}/api/v1/{route}", params=parameters) as answer:
        document = await answer.json()
        assert document["status"] == "success", document
        return document["data"]


async def until_rows(session: ClientSession, url: str, query: str) -> list[Any]:
    """Return the rows of a query once it has some."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                if rows := (await ask(session, url, "query", query=query))["result"]:
                    return list(rows)
            except ClientError:
                # It is starting.
                pass
            await asyncio.sleep(0.1)


@pytest.mark.timeout(400)
async def test_every_query_has_rows_or_a_reason_and_exemplars_lead_to_traces(ray_cluster: None, tmp_path: Path) -> None:
    directory = await run_simulated(tmp_path, "run", *QUICK)
    assert refused_by_promtool(fresh(directory.path).render("")[0]) == ""
    began_s = time.time()
    runpy.run_path(str(SCRIPT))["write"](tmp_path)
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    async with on_loopback(exposition_app(directory.path)) as exporter:
        config["scrape_configs"][0]["static_configs"] = [{"targets": [exporter.removeprefix("http://")]}]
        await every_query_is_answered(tmp_path, config, directory, began_s)


async def every_query_is_answered(
    folder: Path, config: dict[str, Any], directory: RunDirectory, began_s: float
) -> None:
    """Ask Prometheus all queries of rules, alerts and panels about a run that has ended."""
    async with prometheus(folder, config) as url, ClientSession() as session:
        # Rates need two samples, and what is recorded one more round.
        await until_rows(session, url, "count_over_time(headrace_attempts_total[1m]) > 2")
        await until_rows(session, url, "count_over_time(run:headrace_attempts:rate15m[1m]) > 2")

        queries = [rule.query for rule in RECORDINGS]
        queries += [query.text for board in DASHBOARDS for panel in board.panels for query in panel.queries]
        # The condition of an alert is false here: what it asks about must exist.
        queries += sorted({name for alert in ALERTS for name in re.findall(r"(?:run:)?headrace_[\w:]+", alert.query)})
        for query in queries:
            rows = (await ask(session, url, "query", query=query.replace("$instance", ".*")))["result"]
            reasons = [why for name, why in IN_A_QUIET_RUN.items() if name in query]
            assert bool(rows) != bool(reasons), f"{query}: {len(rows)} rows, {reasons}"

        alerts = await ask(session, url, "rules", type="alert")
        states = {
            rule["name"]: (rule["state"], rule["health"]) for group in alerts["groups"] for rule in group["rules"]
        }
        assert states == {alert.name: ("inactive", "ok") for alert in ALERTS}

        counted = (await ask(session, url, "query", query="sum by (state) (headrace_rollouts)"))["result"]
        report = verify(directory.path)
        assert {row["metric"]["state"]: int(row["value"][1]) for row in counted}["trained"] == report.trained == 64

        window = {"start": str(began_s - 3600), "end": str(time.time() + 60)}
        found = await ask(session, url, "query_exemplars", query=f"{table.PART_S.name}_bucket", **window)
        traces = {each["labels"]["trace_id"] for series in found for each in series["exemplars"]}
    assert traces
    with closing(sqlite3.connect(directory.path / "ledger.db")) as database:
        database.execute("ATTACH ? AS archive", (str(directory.path / "archive.db"),))
        rows = "SELECT trace_id FROM {0}.attempts UNION SELECT trace_id FROM {0}.evaluations"
        known = {trace for (trace,) in database.execute(f"{rows.format('main')} UNION {rows.format('archive')}")}
    assert traces <= known
    recorded = {span["trace_id"] for span in SpanFolder.of_run(directory.path).spans(traces=traces)}
    assert recorded == traces


async def test_prometheus_finds_a_run_at_the_control_api_as_the_guide_says(tmp_path: Path) -> None:
    rig, guide = ControlRig(tmp_path), SCRIPT.parents[1] / "docs" / "monitoring.md"
    run = (await rig.call("POST", "/v1/runs", {"name": "a", "recipe": RECIPE}, idempotency_key="k")).document["run_id"]
    rig.runs.folders[RunId(run)] = await asyncio.to_thread(simulated_run, tmp_path / "run", steps=4)
    (tmp_path / "key").write_text("alice-read")
    [text] = re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.DOTALL)
    text = text.replace("/etc/prometheus/headrace.key", str(tmp_path / "key"))
    async with serving(rig.app) as api, ClientSession() as session:
        config = yaml.safe_load(text.replace("http://HOST:8000", api))
        async with prometheus(tmp_path, config) as url:
            found = await until_rows(session, url, 'headrace_steps_total{outcome="updated"}')
    await rig.runs.pages.close()
    assert [(row["metric"]["instance"], row["value"][1]) for row in found] == [(f"a-{run[:8]}", "4")]
