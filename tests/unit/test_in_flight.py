"""Rollouts in flight: from the ledger and the workers' files, during a run and after it was killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.running import FOLDER, RunningFile, RunningRollout, read_running, write_running
from headrace.actors.telemetry.slow.in_flight import SILENT_S, in_flight
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import RolloutOrder
from support import replay_cases as cases

NOW = 1_800_000_000.0
LONG = cases.SMALL.model_copy(update={"group_size": 12, "batch_size": 12})


def seen(order: RolloutOrder, part: str, *, since: float, purpose: str = "train") -> RunningRollout:
    return RunningRollout(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        task=order.task_id,
        purpose=purpose,
        agent="shell",
        host="host-1",
        part=part,
        started_s=NOW,
        part_since_s=since,
    )


def file_of(*rollouts: RunningRollout, written: float, worker: str = "w1") -> RunningFile:
    return RunningFile(worker=worker, node="n1", pid=7, written_s=written, rollouts=rollouts)


@pytest.fixture
async def run(tmp_path: Path):
    """A run with nine ended rollouts of 10 s and three in flight, of which a worker has written about two."""
    clock = [NOW]
    async with await ReplayStore.open(
        tmp_path, LONG, cases.tasks(1), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(12, version)
        clock[0] = NOW + 10
        await store.offer_many([cases.result(order, version) for order in orders[:9]])
    left = orders[9:]
    write_running(
        tmp_path / FOLDER,
        file_of(
            seen(orders[0], "evaluate", since=NOW + 9),
            seen(left[0], "agent", since=NOW + 2),
            seen(left[1], "boot", since=NOW + 25),
            written=NOW + 29,
        ),
    )
    return RunDirectory(path=tmp_path), left


async def test_running_rollouts_are_listed_with_their_part_against_the_cohort(run) -> None:
    directory, left = run
    rows = in_flight(directory, driven=True, now_s=NOW + 32)
    assert sorted((row.rollout_id, row.part, row.part_s, row.age_s) for row in rows) == sorted(
        [
            (left[0].rollout_id, "agent", 30.0, 32.0),
            (left[1].rollout_id, "boot", 7.0, 32.0),
            (left[2].rollout_id, "dispatch", 32.0, 32.0),
        ]
    )
    assert not any(row.interrupted for row in rows)
    first = next(row for row in rows if row.rollout_id == left[0].rollout_id)
    assert first.typical is not None
    assert (first.typical.n, first.typical.p50_s, first.stuck) == (9, 10.0, True)
    assert first.line().endswith(f"host host-1  worker w1  task {left[0].task_id}  STUCK")


async def test_after_a_kill_they_are_interrupted_with_the_last_known_part(run) -> None:
    directory, left = run
    rows = {row.rollout_id: row for row in in_flight(directory, driven=False, now_s=NOW + 9999)}
    assert set(rows) == {order.rollout_id for order in left}
    assert all(row.interrupted for row in rows.values())
    first = rows[left[0].rollout_id]
    assert (first.part, first.part_s, first.age_s) == ("agent", 27.0, 29.0), "up to the worker's last word"


async def test_a_worker_that_is_silent_interrupts_only_its_own_rollouts(run) -> None:
    directory, left = run
    late = NOW + 29 + SILENT_S + 1
    write_running(directory.path / FOLDER, file_of(seen(left[2], "agent", since=late), written=late, worker="w2"))
    rows = {row.rollout_id: row for row in in_flight(directory, driven=True, now_s=late)}
    assert {order.rollout_id: rows[order.rollout_id].interrupted for order in left} == {
        left[0].rollout_id: True,
        left[1].rollout_id: True,
        left[2].rollout_id: False,
    }


async def test_an_evaluation_is_known_from_the_file_alone_and_never_older_than_its_clock_says(run) -> None:
    directory, left = run
    held_out = replace(left[0], rollout_id="base/t/0", task_id="t")
    ahead = replace(seen(held_out, "agent", since=NOW + 900, purpose="evaluation"), started_s=NOW + 900)
    write_running(directory.path / FOLDER, file_of(ahead, written=NOW + 31, worker="w2"))
    row = next(row for row in in_flight(directory, driven=True, now_s=NOW + 32) if row.purpose == "evaluation")
    assert (row.rollout_id, row.age_s, row.part_s) == ("base/t/0", 0.0, 0.0)


async def test_a_damaged_file_is_named_and_left_out(run, caplog: pytest.LogCaptureFixture) -> None:
    directory, _ = run
    (directory.path / FOLDER / "w3.json").write_bytes(b'{"worker": "w3"')
    assert len(read_running(directory.path / FOLDER)) == 1
    assert "w3.json is damaged" in caplog.text


def test_a_folder_without_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerRefused, match=r"has no ledger\.db"):
        in_flight(RunDirectory(path=tmp_path), driven=False)
