"""Kill -9 of every kind of process of an observed run: no rollout vanishes from view, no span is sent twice, and the
exported counts are those of the ledger."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.telemetry.prometheus.exposition import Exposition
from headrace.actors.telemetry.slow.in_flight import in_flight
from headrace.actors.telemetry.spans.exporting import CURSOR, FOLDER, Cursor
from headrace.actors.telemetry.spans.store import FOLDER as SPANS
from headrace.buffer.audit.evidence import has_begun, read_evidence
from headrace.buffer.audit.verify import verify
from support import run_rig as runs
from support.collectors import http_collector
from support.scrapes import OPENMETRICS

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(3600)]
KILLS = 20
HANG_S = 900.0
DRAINED = 4
KINDS = ("worker", "gateway", "evaluator", "observer", "driver")


def waited(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.2)


def process_of(directory: RunDirectory, kind: str) -> int | None:
    """The process id of a living actor, from the file that it writes; None while it has none."""
    if kind == "observer":
        page = directory.path / FOLDER / "page.json"
        ids = [int(orjson.loads(page.read_bytes())["pid"])] if page.exists() else []
    else:
        found = (
            re.fullmatch(rf"{kind}.*-(\d+)\.jsonl", path.name) for path in (directory.path / SPANS).glob("*.jsonl")
        )
        ids = [int(match[1]) for match in found if match]
    return next((pid for pid in ids if has_open(pid, directory.path)), None)


def has_open(pid: int, folder: Path) -> bool:
    """Whether a process has a file of the folder open: an id in a file may be that of another process by now."""
    try:
        return any(each.readlink().is_relative_to(folder) for each in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False


def steps(directory: RunDirectory) -> int:
    return len(read_evidence(directory.path).commits) if has_begun(directory.path) else 0


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
        began_s = time.monotonic()
        driver = begin(("run", str(runs.RECIPE), *outputs, *runs.small_arguments(), *more))
        try:
            for number, kind in enumerate(kills):
                before = steps(directory)
                waited(
                    lambda before=before, driver=driver: steps(directory) > before or driver.poll() is not None,
                    f"no step after kill {number} of {kills}",
                )
                assert driver.poll() is None, driver.communicate()[1].decode()
                print(f"{time.monotonic() - began_s:.0f} s: {before + 1} steps, kill {number + 1}: {kind}", flush=True)
                if kind == "driver":
                    driver.kill()
                    driver.communicate()
                    every_rollout_is_in_view(directory)
                    driver = begin(("resume", str(directory.path)))
                else:
                    killed(directory, kind)
                    every_rollout_is_in_view(directory)
            driver.send_signal(signal.SIGINT)
            said = driver.communicate(timeout=HANG_S)[1].decode()
            assert driver.returncode == DRAINED, said
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
    counted = totals(Exposition(directory).render(OPENMETRICS)[0].decode())
    assert counted["steps_total"] - counted["steps_rolled_back_total"] == report.steps + report.steps_skipped
    assert counted["steps_rolled_back_total"] == report.steps_rolled_back
    assert counted["rollouts"] == report.issued > 0
    assert counted["rollouts trained"] == report.trained > 0


def killed(directory: RunDirectory, kind: str) -> None:
    """Kill the actor as soon as it has a process."""
    found: list[int] = []

    def is_killed() -> bool:
        if (pid := process_of(directory, kind)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                found.append(pid)
        return bool(found)

    waited(is_killed, f"no process of {kind}")


def totals(text: str) -> Counter[str]:
    """The sum of the samples of each name without its prefix; rollouts also by state."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("headrace_")
            sums[name] += sample.value
            if name == "rollouts":
                sums[f"rollouts {sample.labels['state']}"] += sample.value
    return sums


def open_attempts(directory: RunDirectory) -> set[tuple[str, int]]:
    """The attempts of the ledger that have not ended."""
    attempts = read_evidence(directory.path).attempts
    return {(each.rollout_id, each.attempt) for each in attempts if each.ended_at_s is None}


def every_rollout_is_in_view(directory: RunDirectory) -> None:
    """Each attempt of the ledger has ended, or `status --running` has it. Actors outlive their driver by a moment, and
    go on meanwhile: what was open before the list was made and is open after it must be in it."""
    before = open_attempts(directory)
    listed = {(row.rollout_id, row.attempt) for row in in_flight(directory, driven=directory.is_driven())}
    assert (before & open_attempts(directory)) <= listed
