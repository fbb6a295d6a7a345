"""Kill -9 of every kind of process of an observed run: no rollout vanishes from view, no span is sent twice, and the
exported counts are those of the ledger."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.actors.exposition.exposition import OPENMETRICS, Exposition
from headrace.actors.record.run_directory import RunDirectory
from headrace.actors.slowness.in_flight import in_flight
from headrace.actors.traces.exporting import CURSOR, FOLDER, Cursor
from headrace.actors.traces.store import FOLDER as SPANS
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from support import run_rig as runs
from support.collectors import http_collector

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(3600)]
KILLS = 20
HANG_S = 300.0
KINDS = ("worker", "gateway", "evaluator", "observer", "driver")


def waited(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.2)


def process_of(directory: RunDirectory, kind: str) -> int | None:
    """The process id of an actor, from the file that it writes; None while it has none."""
    if kind == "driver":
        return directory.driver_pid()
    if kind == "observer":
        page = directory.path / FOLDER / "page.json"
        return int(orjson.loads(page.read_bytes())["pid"]) if page.exists() else None
    found = [re.fullmatch(rf"{kind}.*-(\d+)\.jsonl", path.name) for path in (directory.path / SPANS).glob("*.jsonl")]
    alive = [int(match[1]) for match in found if match and Path(f"/proc/{match[1]}").exists()]
    return alive[-1] if alive else None


def steps(directory: RunDirectory) -> int:
    return len(read_evidence(directory.path).commits) if (directory.path / "ledger.db").exists() else 0


def begin(command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    return runs.start_driver(*command, "--quiet")


def test_twenty_kills_lose_no_rollout_repeat_no_span_and_keep_counts(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    # Each kind four times, in any order.
    kills = [kind for kind in KINDS for _ in range(KILLS // len(KINDS))]
    choice.shuffle(kills)
    directory = RunDirectory(path=tmp_path / "run")
    with http_collector() as (url, collected):
        telemetry = (f"telemetry.otlp_endpoint={url}", "telemetry.otlp_share=0.5", "telemetry.page=127.0.0.1:0")
        more = [part for each in (*telemetry, "training.steps=100000") for part in ("--set", each)]
        outputs = ("--runs-dir", str(tmp_path), "--name", "run")
        driver = begin(("run", str(runs.RECIPE), *outputs, *runs.small_arguments(), *more))
        try:
            for number, kind in enumerate(kills):
                before = steps(directory)
                waited(lambda before=before: steps(directory) > before, f"no step after kill {number} of {kills}")
                waited(lambda kind=kind: process_of(directory, kind) is not None, f"no process of {kind}")
                pid = process_of(directory, kind)
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                if kind == "driver":
                    driver.communicate()
                    every_rollout_is_in_view(directory)
                    driver = begin(("resume", str(directory.path)))
            os.kill(driver.pid, signal.SIGINT)
            driver.communicate(timeout=HANG_S)
        finally:
            if driver.poll() is None:
                driver.kill()
                driver.communicate()
        spans = collected.spans()
    sent = [(span["trace_id"], span["span_id"]) for span in spans]
    assert len(sent) > 100
    assert len(set(sent)) == len(sent), "a span was sent twice"
    cursor = Cursor.read(directory.path / FOLDER / CURSOR)
    print(json.dumps({"kills": kills, "spans": len(sent), "unconfirmed": cursor.unconfirmed}))
    every_rollout_is_in_view(directory)
    report = verify(directory.path)
    assert report.clean, report.problems
    text = Exposition(directory).render(OPENMETRICS)[0].decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    counted = {
        name: sum(sample.value for sample in samples if sample.name == f"headrace_{name}_total")
        for name in ("steps", "steps_rolled_back")
    }
    assert counted["steps"] - counted["steps_rolled_back"] == report.steps


def every_rollout_is_in_view(directory: RunDirectory) -> None:
    """Each attempt of the ledger has ended, or `trace running` lists it."""
    listed = {(row.rollout_id, row.attempt) for row in in_flight(directory, driven=directory.is_driven())}
    for attempt in read_evidence(directory.path).attempts:
        assert attempt.ended_at_s is not None or (attempt.rollout_id, attempt.attempt) in listed, attempt
