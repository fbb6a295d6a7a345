"""Where the time of held-out evaluations went: rows, verdicts, and the commands."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.actors.cli.trace import trace_app
from headrace.actors.simulation.virtual.plan import make_plan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.actors.telemetry.slow.reading import read_evaluation_times, read_times
from headrace.actors.telemetry.slow.verdicts import explain
from headrace.buffer.audit.evidence import begin_with_archive, reading
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.core.records import EvaluationRecord

ROOT = Path(__file__).parents[2]


def evaluations(run: Path) -> list[EvaluationRecord]:
    with reading(run) as (database, archive):
        attached, _ = begin_with_archive(database, archive)
        return list(JoinedRows(database, attached=attached).of(EvaluationRecord))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run of which a third of the boots on one of four hosts take sixty times as long."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    slowdowns = '[{kind = "host", name = "host-1", factor = 60, share = 0.3}]'
    sizes = {"batch_size": 32, "slots": 64, "steps": 8, "seed": 5, "evaluate_every": 2, "heldout": 24}
    run_plan(make_plan("swe64", sizes, ["hosts=4", "boot_s=10", "tasks=8", f"slowdowns={slowdowns}"]), folder)
    return folder


@pytest.mark.whole
def test_each_rollout_of_an_evaluation_is_a_row(run: Path) -> None:
    times, recorded = read_evaluation_times(run), evaluations(run)
    assert {row.rollout_id for row in times.rows} == {record.rollout_id for record in recorded}
    assert len(times.rows) > 60
    for row in times.rows:
        assert row.purpose == "evaluation"
        assert row.ended_at_s is not None
        assert sum(row.parts_s.values()) == pytest.approx(row.total_s)
        assert row.issued_at_s <= row.last_issued_at_s <= row.ended_at_s
    assert "evaluation" not in {interval.kind for interval in times.meanwhile}
    assert not {row.rollout_id for row in times.rows} & {row.rollout_id for row in read_times(run).rows}


@pytest.mark.whole
def test_slow_evaluations_are_explained(run: Path) -> None:
    found = CliRunner().invoke(trace_app, ["slow", str(run), "--evaluations", "--json", "-"], catch_exceptions=False)
    report = json.loads(found.stdout)
    assert report["rollouts"] == len(read_evaluation_times(run).rows)
    cause = max(report["causes"], key=lambda cause: cause["excess_s"])
    assert (cause["part"], cause["factor"]["kind"], cause["factor"]["value"]) == ("boot", "host", "host-1")
    # Training is explained by itself.
    assert json.loads(CliRunner().invoke(trace_app, ["slow", str(run), "--json", "-"]).stdout)["rollouts"] == len(
        read_times(run).rows
    )


def test_a_rollout_of_an_evaluation_is_drawn_beside_its_cohort(run: Path) -> None:
    row = read_evaluation_times(run).rows[0]
    shown = CliRunner().invoke(trace_app, ["show", str(run), row.rollout_id], catch_exceptions=False)
    assert shown.stdout.startswith(f"rollout {row.rollout_id} attempt 1")
    assert "boot" in shown.stdout


def test_a_second_attempt_contains_the_time_of_the_first(run: Path, tmp_path: Path) -> None:
    row = read_evaluation_times(run).rows[0]
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("ledger.db", "archive.db", "config.json"):
        if (run / name).exists():
            (copy / name).write_bytes((run / name).read_bytes())
    for name in ("ledger.db", "archive.db"):
        if not (copy / name).exists():
            continue
        with closing(sqlite3.connect(copy / name)) as database:
            columns = [column for _, column, *_ in database.execute("PRAGMA table_info(evaluations)")]
            later = {"attempt": "attempt + 1", "recorded_at_s": "recorded_at_s + 1000"}
            database.execute(
                f"INSERT INTO evaluations ({', '.join(columns)}) SELECT {', '.join(later.get(c, c) for c in columns)} "
                "FROM evaluations WHERE rollout_id = ?",
                (row.rollout_id,),
            )
            database.commit()
    again = next(each for each in read_evaluation_times(copy).rows if each.rollout_id == row.rollout_id)
    assert again.attempt == 2
    assert again.parts_s["earlier_attempts"] == pytest.approx(1000.0)
    assert again.total_s == pytest.approx(row.total_s + 1000.0)


def test_rollouts_without_a_breakdown_are_counted() -> None:
    folder = ROOT / "tests/golden/ledger"
    times, recorded = read_evaluation_times(folder), evaluations(folder)
    unmeasured = {record.rollout_id for record in recorded if record.breakdown is None}
    assert len(times.rows) == len({record.rollout_id for record in recorded} - unmeasured)
    assert any("have no breakdown" in line for line in times.missing) is bool(unmeasured)
    assert explain(times).rollouts == len(times.rows)
