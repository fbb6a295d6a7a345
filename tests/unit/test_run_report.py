"""What `headrace report` tells of a run directory."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import orjson
from rich.console import Console

from headrace.actors.reporting import RunReport, report_of
from headrace.actors.run_directory import RunDirectory
from headrace.buffer.evidence import read_evidence
from headrace.buffer.verify import verify

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger_v2"


def told_of(folder: Path, *, metrics: tuple[dict, ...] = ()) -> RunReport:
    directory = RunDirectory(path=shutil.copytree(GOLDEN, folder))
    directory.metrics.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in metrics))
    return report_of(directory)


def stations(seconds: float, sandboxes: float) -> dict:
    loads = {
        "sandbox": {"in_use": sandboxes, "capacity": 64, "mean_s": 9.0},
        "learner": {"in_use": 0.4, "capacity": 1, "mean_s": 1.0},
    }
    return {"kind": "stations", "time_s": 0.0, "seconds": seconds, "held_up_by": None, "stations": loads}


def test_what_the_ledger_holds(tmp_path: Path) -> None:
    report, evidence = told_of(tmp_path / "run"), read_evidence(tmp_path / "run")
    checked = verify(tmp_path / "run")
    assert report.steps == checked.steps
    assert max(report.staleness) == checked.max_staleness_seen
    assert sum(report.causes.values()) == sum(attempt.cause is not None for attempt in evidence.attempts)
    assert sum(decile.finished for decile in report.deciles) == sum(
        attempt.reward is not None for attempt in evidence.attempts
    )
    assert report.early.groups > 0, "the golden ledger seals with a count"
    assert report.early.late >= report.early.late_finished
    assert orjson.loads(orjson.dumps(report.to_json()))["steps"] == report.steps


def test_the_station_that_was_full_is_named(tmp_path: Path) -> None:
    report = told_of(tmp_path / "run", metrics=(stations(30.0, 64.0), stations(10.0, 56.0)))
    assert report.held_up_by == "sandbox"
    sandbox, learner = report.stations
    assert (sandbox.in_use, learner.utilisation) == (62.0, 0.4)


def test_what_slowed_the_run_down_is_named(tmp_path: Path) -> None:
    limits = ((32, ""), (22, "engines are full"), (15, "boot takes 9 s"), (19, "boot takes 9 s"))
    slow = [stations(10.0, 4.0) | {"rollout_limit": limit, "slowed_by": reason} for limit, reason in limits]
    report = told_of(tmp_path / "run", metrics=(stations(10.0, 4.0), *slow))
    assert (report.slowed_to, report.slowed_by) == (15, "boot takes 9 s")
    assert told_of(tmp_path / "other", metrics=(stations(10.0, 4.0),)).slowed_to is None


def test_a_person_can_read_it(tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    report = told_of(tmp_path / "run", metrics=(stations(30.0, 64.0) | {"rollout_limit": 8, "slowed_by": "boot"},))
    console.print(report.tables())
    text = console.export_text()
    assert "held up by sandbox" in text
    assert "slowed down to 8 rollouts: boot" in text
    assert "duration up to" in text
    assert f"{report.early.groups} groups were sealed early" in text
