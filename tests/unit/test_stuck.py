"""Rollouts that take far longer than their cohort are named once; the oldest is in every diagnosis."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from opentelemetry.trace import get_tracer

from headrace.actors.record.files.running import FEW, FOLDER, MAX_FILES, read_running, remove_oldest_running
from headrace.actors.rollouts.attempt_time import AttemptTime
from headrace.actors.rollouts.running_book import MAX_TASKS, RunningBook, StuckWatch
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.types import GroupId, RolloutId, RolloutOrder
from support.gateway_rig import until

TRACER = get_tracer("test")


def order(number: int, task: str = "t") -> RolloutOrder:
    return RolloutOrder(rollout_id=RolloutId(f"r{number}"), group_id=GroupId("g"), attempt=1, task_id=TaskId(task))


def test_a_stuck_rollout_is_named_once_and_never_without_a_cohort() -> None:
    watch = StuckWatch()
    assert watch.warning(order(99), 1e9, "boot", 1.0) is None
    for number in range(FEW):
        watch.ended(order(number), 10.0)
    assert watch.warning(order(99), 29.0, "boot", 20.0) is None
    line = watch.warning(order(99), 31.0, "boot", 22.0)
    assert line is not None
    assert line.startswith("rollout r99 attempt 1 has taken 31.0 s, more than 3 times the p95 of its cohort (10.0 s)")
    assert "in boot for 22.0 s" in line
    assert watch.warning(order(99), 60.0, "boot", 51.0) is None
    watch.ended(order(99), None)
    assert watch.warning(order(99), 31.0, "boot", 22.0) is not None, "the next attempt"


def test_a_task_that_always_takes_long_is_its_own_cohort() -> None:
    watch = StuckWatch()
    for number in range(FEW):
        watch.ended(order(number, "quick"), 1.0)
        watch.ended(order(number, "long"), 100.0)
    assert watch.warning(order(50, "long"), 200.0, "agent", 190.0) is None
    assert watch.warning(order(51, "quick"), 200.0, "agent", 190.0) is not None


def test_durations_of_many_tasks_are_forgotten() -> None:
    watch = StuckWatch()
    for number in range(5 * MAX_TASKS):
        watch.ended(order(number, f"task-{number}"), 10.0)
    assert watch.p95_s(order(0, "another")) == 10.0
    assert len(watch._ended) <= MAX_TASKS


async def test_the_file_says_what_runs(tmp_path: Path) -> None:
    book, late = RunningBook("w1"), AttemptTime()
    book.begin(order(99), late)
    keeping = asyncio.ensure_future(book.keep(tmp_path))
    with late.clock(TRACER, "boot", "boot", "boot"):
        await until(lambda: bool(read_running(tmp_path / FOLDER)))
    keeping.cancel()
    await asyncio.wait([keeping])
    (file,) = read_running(tmp_path / FOLDER)
    assert [(each.rollout_id, each.part) for each in file.rollouts] == [("r99", "boot")]


def test_the_oldest_rollout_is_described() -> None:
    async def main() -> str:
        book = RunningBook("w1")
        for number in range(2):
            spent = AttemptTime()
            book.begin(order(number), spent)
            with spent.clock(TRACER, "boot", "boot", "boot"):
                await asyncio.sleep(20.0)
        return book.oldest()

    assert run_virtual(main()) == "rollout r0 attempt 1 has run for 40 s and has been in other for 20 s"
    assert RunningBook("w1").oldest() == ""


@pytest.mark.parametrize("scored", [True, False])
def test_an_attempt_that_never_began_ends_silently(scored: bool) -> None:
    RunningBook("w1").end((RolloutId("r"), 1), scored=scored)


def test_files_of_workers_that_were_replaced_do_not_grow_without_bound(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 3):
        path = tmp_path / f"w{number}.json"
        path.write_bytes(b"{}")
        os.utime(path, (number, number))
    remove_oldest_running(tmp_path)
    assert not any((tmp_path / f"w{number}.json").exists() for number in range(3))
    assert len(list(tmp_path.iterdir())) == MAX_FILES
