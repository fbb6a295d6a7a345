# ruff: noqa: ASYNC110, ASYNC240 - the test reads files of another process, which tells nobody
"""The observer of a real run: traces at a collector, the page and the metrics, over a kill -9 and a full stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.actors.run.launch import RunRequest, prepare
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.telemetry.spans.exporting import CURSOR, FOLDER, Cursor
from headrace.actors.telemetry.spans.store import SpanFolder
from support import run_rig as runs
from support.cluster_rig import QUICK
from support.collectors import Collected, http_collector

pytestmark = [
    pytest.mark.slow,
    pytest.mark.namespaces,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("ray_cluster"),
]
HANG_S = 240.0


async def fetched(page: Path, path: str, accept: str = "text/html") -> str:
    """What the page answers, asked until it does: it may be starting."""
    async with asyncio.timeout(HANG_S), aiohttp.ClientSession() as session:
        while True:
            try:
                address = orjson.loads(page.read_bytes())
                headers = {"Authorization": f"Bearer {address['token']}", "Accept": accept}
                async with session.get(address["url"] + path, headers=headers) as answer:
                    if answer.status == 200:
                        return await answer.text()
                    assert answer.status == 503, await answer.text()
            except (aiohttp.ClientError, FileNotFoundError):
                pass
            await asyncio.sleep(0.2)


async def arrived(collected: Collected, name: str) -> None:
    async with asyncio.timeout(HANG_S):
        while not any(span["name"] == name for span in collected.spans()):
            await asyncio.sleep(0.2)


def ids(spans: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(span["trace_id"], span["span_id"]) for span in spans]


async def test_an_observer_killed_in_a_run_sends_each_span_once_and_serves_the_page(tmp_path: Path) -> None:
    with http_collector() as (url, collected):
        # Long enough that the observer is back before the end: its successor begins at a call of the service.
        more = ("training.steps=60",)
        overrides = (*more, f"telemetry.otlp_endpoint={url}", "telemetry.otlp_share=1", "telemetry.page=127.0.0.1:0")
        async with runs.open_service(tmp_path, "observed", *overrides) as (service, directory):
            running = asyncio.create_task(service.run())
            page = directory.path / FOLDER / "page.json"
            assert "observed" in await fetched(page, "")
            await arrived(collected, "step")
            before = orjson.loads(page.read_bytes())
            os.kill(before["pid"], signal.SIGKILL)
            async with asyncio.timeout(HANG_S):
                while orjson.loads(page.read_bytes())["pid"] == before["pid"]:
                    await asyncio.sleep(0.2)
            assert orjson.loads(page.read_bytes())["token"] == before["token"], "a link keeps working"
            assert await running
            metrics = await fetched(page, "metrics", "application/openmetrics-text; version=1.0.0")
        spans = collected.spans()
    assert len(set(ids(spans))) == len(spans), "no span is sent twice"
    cursor = Cursor.read(directory.path / FOLDER / CURSOR)
    assert (cursor.open, cursor.sending) == ({}, []), "the end of the run sends what is left"
    recorded = list(SpanFolder.of_run(directory.path).spans())
    roots = [span["trace_id"] for span in recorded if span["name"] == "rollout"]
    sent = {span["trace_id"] for span in spans}
    assert len(set(roots) - sent) <= cursor.unconfirmed
    whole = {trace for trace in roots if trace in sent}
    assert sorted(ids([span for span in spans if span["trace_id"] in whole])) == sorted(
        ids([span for span in recorded if span["trace_id"] in whole])
    )
    assert any(family.name.startswith("headrace_rollouts") for family in text_string_to_metric_families(metrics))


async def test_an_observer_killed_when_the_run_has_ended_is_restarted_for_the_last_traces(tmp_path: Path) -> None:
    recipe = runs.RECIPE.with_name("simulated.toml")
    with http_collector() as (url, collected):
        telemetry = (f"telemetry.otlp_endpoint={url}", "telemetry.otlp_share=1", "telemetry.page=127.0.0.1:0")
        overrides = (*telemetry, *QUICK, "training.steps=4")
        config, directory = prepare(RunRequest(recipe=recipe, runs_dir=tmp_path, name="late", overrides=overrides))
        runtime = RayRuntime("late-")
        service = await runtime.spawn(Service, config, directory, runtime, name="service")
        try:
            assert await service.run()
            page = orjson.loads((directory.path / FOLDER / "page.json").read_bytes())
            os.kill(page["pid"], signal.SIGKILL)
        finally:
            await runtime.stop(service)
        spans = collected.spans()
    assert len(set(ids(spans))) == len(spans)
    cursor = Cursor.read(directory.path / FOLDER / CURSOR)
    assert (cursor.open, cursor.sending) == ({}, [])
    recorded = [span["trace_id"] for span in SpanFolder.of_run(directory.path).spans() if span["name"] == "rollout"]
    assert len(set(recorded) - {span["trace_id"] for span in spans}) <= cursor.unconfirmed < len(set(recorded))
