"""Pure parts of the soak and the bench of a cluster: the order of faults, times of recovery, names of processes."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from benches.cluster.faults import WITHOUT_SERVE, Fault, FaultKind, plan_faults
from benches.cluster.figures import Passed, misses, report
from benches.cluster.ledger_times import Recovery, read_orders, read_steps, recovery, wall_s
from benches.cluster.processes import HostProcess, actors, grown, increase, name_of
from benches.cluster.soak import Injected, worst_by_kind


def test_a_seed_gives_the_same_faults_and_every_kind_equally_often() -> None:
    kinds = tuple(FaultKind)
    planned = plan_faults(kinds, 3 * len(kinds) + 2, seed=5)
    assert planned == plan_faults(kinds, 3 * len(kinds) + 2, seed=5)
    assert [fault.kind for fault in planned] != [fault.kind for fault in plan_faults(kinds, len(planned), seed=6)]
    counts = Counter(fault.kind for fault in planned)
    assert set(counts) == set(kinds)
    assert max(counts.values()) - min(counts.values()) == 1


def test_only_the_named_kinds_are_planned() -> None:
    assert FaultKind.REPLICA not in {fault.kind for fault in plan_faults(WITHOUT_SERVE, 40, seed=1)}


@pytest.mark.parametrize(("draw", "chosen"), [(0.0, "a"), (0.49, "a"), (0.5, "b"), (0.999, "b")])
def test_a_draw_chooses_among_the_candidates(draw: float, chosen: str) -> None:
    assert Fault(kind=FaultKind.ACTOR, draw=draw).choose(["a", "b"]) == chosen


def test_recovery_counts_from_the_beginning_of_the_fault() -> None:
    found = recovery([99.0, 101.5, 103.0], [90.0, 98.0, 104.0, 111.0], 100.0)
    assert found == Recovery(next_order_s=1.5, next_step_s=4.0, longest_gap_s=7.0)


def test_recovery_of_a_run_that_did_not_go_on_has_no_times() -> None:
    assert recovery([99.0], [98.0], 100.0) == Recovery(next_order_s=None, next_step_s=None, longest_gap_s=None)


def test_a_missing_recovery_is_the_worst_of_its_kind() -> None:
    def injected(step_s: float | None) -> Injected:
        times = Recovery(next_order_s=1.0, next_step_s=step_s, longest_gap_s=step_s)
        kind = FaultKind.GCS
        return Injected(kind=kind, target="", recovery=times, took_s=1, steps=1, clean=True, load=0)

    assert worst_by_kind([injected(2.0), injected(5.0)])["gcs_server"]["next_step_s"] == 5.0
    assert worst_by_kind([injected(2.0), injected(None), injected(3.0)])["gcs_server"] == {
        "next_order_s": 1.0,
        "next_step_s": None,
        "longest_gap_s": None,
    }


def test_times_are_read_from_ledger_and_archive(tmp_path: Path) -> None:
    for name, at_s in (("ledger.db", 200.0), ("archive.db", 100.0)):
        with closing(sqlite3.connect(tmp_path / name)) as database, database:
            database.execute("CREATE TABLE commits (committed_at_s REAL)")
            database.execute("CREATE TABLE attempts (issued_at_s REAL, offered INTEGER)")
            database.execute("INSERT INTO commits VALUES (?), (150.0)", (at_s + 20,))
            database.execute("INSERT INTO attempts VALUES (?, 1), (?, 0)", (at_s, at_s - 50))
    assert read_steps(tmp_path) == [120.0, 150.0, 220.0]
    assert read_orders(tmp_path) == [100.0, 200.0]
    assert read_orders(tmp_path, after_s=100.0) == [200.0]
    assert wall_s(tmp_path) == 120.0
    (tmp_path / "archive.db").unlink()
    assert read_steps(tmp_path) == [150.0, 220.0]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ray::RolloutWorker"], "RolloutWorker"),
        (["ray::ServeReplica:control:Control", ""], "ServeReplica"),
        (["ray::LearnerLoop.run"], "LearnerLoop"),
        (["/x/ray/core/src/ray/gcs/gcs_server", "--log_dir=/tmp"], "gcs_server"),
        (["/x/ray/core/src/ray/raylet/raylet", "--raylet_socket_name=/tmp/raylet"], "raylet"),
        (["/x/bin/python", "-u", "/x/ray/_private/log_monitor.py", "--session-dir=/tmp/ray"], "log monitor"),
        (["python", "/x/ray/_private/workers/default_worker.py", "--raylet-name=/tmp/sockets/raylet/raylet"], None),
        (["/bin/bash", "-c", "sleep infinity"], None),
        ([], None),
    ],
)
def test_processes_are_named_by_their_command(command: list[str], name: str | None) -> None:
    assert name_of(command) == name


def process(name: str, created_s: float = 1.0) -> HostProcess:
    return HostProcess(host=11, name=name, process_id=7, created_s=created_s)


def test_actors_are_neither_of_ray_nor_of_serve() -> None:
    names = ["Service", "raylet", "DashboardAgent", "IDLE", "ServeReplica", "ServeController", "Runs"]
    assert [one.name for one in actors(map(process, names))] == ["Service", "Runs"]


def test_growth_is_that_of_the_same_process() -> None:
    before = {process("Replay"): 100.0, process("Runs"): 50.0}
    growth = increase(before, {process("Replay"): 109.0, process("Runs", 2.0): 90.0, process("Service"): 10.0})
    assert growth == {process("Replay"): 9.0}
    assert grown(growth) == ["Replay 7 on host 11 grew by 9.0 MiB, above 8"]
    assert grown({process("Runs"): 8.0}) == []


def passed(wall_s: float, **changes: float) -> Passed:
    values = {"rollouts": 1000, "cpu_s": 13.0, "lost": 0, "trained_twice": 0, "staleness": 2, "bound": 4}
    return Passed(wall_s=wall_s, measured_s=wall_s, **{**values, **changes})  # type: ignore[arg-type]


def test_the_figures_are_medians_and_exclude_idle_cpu() -> None:
    figures = report([passed(10.0), passed(30.0), passed(11.0)], [passed(10.0), passed(9.0), passed(90.0)], 1.0)
    assert figures["wall_over_local"] == pytest.approx(1.1)
    assert figures["ray_cpu_ms_per_rollout"] == pytest.approx(2.0)
    assert figures["idle_cpu_per_s"] == 1.0
    assert misses(figures) == []


def test_every_missed_limit_is_named() -> None:
    figures = report([passed(15.0, lost=1, trained_twice=1, staleness=5, cpu_s=30.0)], [passed(10.0)], 1.0)
    assert len(misses(figures)) == 5
