"""The incarnation fence: of two holders only the newer one acts, whatever happens to storage and processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace.actors.errors import RunFenced, StorageLost
from headrace.actors.record.storage.incarnation import (
    FILES_KEPT,
    FOLDER,
    Fence,
    FenceConfig,
    Incarnation,
    IncarnationRecord,
)
from support.full_disks import files_of_at_most
from support.incarnation_holder import QUICK

GUARD_S = 60
DEFAULT = FenceConfig()
OFTEN = FenceConfig(renew_s=0.01)
"""Renews at once; its other times pass only on the test's clock."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def newest_incarnation(storage: Path) -> IncarnationRecord:
    names = sorted(path for path in (storage / FOLDER).iterdir() if path.suffix == ".json")
    return IncarnationRecord(**json.loads(names[-1].read_bytes()))


def record(number: int) -> IncarnationRecord:
    return IncarnationRecord(number=number, host="other", boot="b", process_id=1, started_s=0.0, renewed_s=0.0)


@asynccontextmanager
async def held(
    storage: Path, clock: Clock, config: FenceConfig = OFTEN
) -> AsyncIterator[tuple[Incarnation, asyncio.Task[None]]]:
    incarnation = await Incarnation.take(storage, config, clock=clock)
    holding = asyncio.create_task(incarnation.hold())
    try:
        yield incarnation, holding
    finally:
        holding.cancel()
        await asyncio.wait([holding])


async def renewals(storage: Path, count: int) -> None:
    """Wait until the newest incarnation has been renewed `count` times; of three renewals, its holder knows of at least
    one that began after the call."""
    seen = set()
    async with asyncio.timeout(GUARD_S):
        while len(seen) <= count:
            seen.add(newest_incarnation(storage).renewed_s)
            await asyncio.sleep(0.005)


async def failed(incarnation: Incarnation) -> None:
    """Wait until a renewal has failed."""
    async with asyncio.timeout(GUARD_S):
        while not incarnation.failure:  # noqa: ASYNC110 - as `headrace status` asks
            await asyncio.sleep(0.005)


def test_times_that_let_two_incarnations_act_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"takeover_s \(35\) must exceed end_after_s \+ renew_s \+ margin_s \(40"):
        FenceConfig(takeover_s=35.0)
    with pytest.raises(ValidationError, match=r"end_after_s \(8\) must exceed 2 \* renew_s \(10\)"):
        FenceConfig(end_after_s=8.0)


def test_a_holder_without_renewal_ends_after_the_limit() -> None:
    fence = Fence(DEFAULT, 1, 100.0)
    fence.check(129.9)
    fence.renewed(120.0, record(1))
    fence.check(149.9)
    fence.failure = "Input/output error"
    with pytest.raises(StorageLost, match=r"could not be renewed in storage for 30 s \(Input/output error\)"):
        fence.check(150.0)


def test_a_renewal_counts_from_its_start() -> None:
    fence = Fence(DEFAULT, 1, 100.0)
    fence.renewed(101.0, record(1))
    with pytest.raises(StorageLost):
        fence.check(131.0)


def test_a_newer_incarnation_fences_for_good() -> None:
    fence = Fence(DEFAULT, 1, 100.0)
    with pytest.raises(RunFenced, match="incarnation 3 on other has taken over the run: incarnation 1 ends"):
        fence.renewed(101.0, record(3))
    with pytest.raises(RunFenced):
        fence.check(101.0)


async def test_the_second_holder_acts_only_after_the_first_must_have_ended(tmp_path: Path, clock: Clock) -> None:
    async with held(tmp_path, clock) as (first, ending), asyncio.timeout(GUARD_S):
        await first.acquire()
        await renewals(tmp_path, 3)
        async with held(tmp_path, clock) as (second, _):
            acquiring = asyncio.create_task(second.acquire())
            with pytest.raises(RunFenced, match="incarnation 2 on"):
                await ending
            with pytest.raises(RunFenced):
                first.check()
            clock.now_s += 25
            await renewals(tmp_path, 3)
            clock.now_s += DEFAULT.takeover_s - 25 - 1
            await renewals(tmp_path, 3)
            assert not acquiring.done()
            clock.now_s += 1.5
            await acquiring
            second.check()


async def test_of_two_waiting_holders_the_newer_one_acquires(tmp_path: Path, clock: Clock) -> None:
    await Incarnation.take(tmp_path, OFTEN, clock=clock)
    async with held(tmp_path, clock) as (_, ending), held(tmp_path, clock) as (third, _), asyncio.timeout(GUARD_S):
        with pytest.raises(RunFenced):
            await ending
        clock.now_s += 29
        await renewals(tmp_path, 3)
        clock.now_s += 17
        await third.acquire()
    assert third.number == 3


async def test_a_holder_ends_when_its_storage_vanishes_and_survives_a_short_absence(
    tmp_path: Path, clock: Clock
) -> None:
    storage, away = tmp_path / "storage", tmp_path / "away"
    storage.mkdir()
    async with held(storage, clock) as (incarnation, ending), asyncio.timeout(GUARD_S):
        await renewals(storage, 1)
        storage.rename(away)
        await failed(incarnation)
        clock.now_s += DEFAULT.end_after_s - 1
        incarnation.check()
        away.rename(storage)
        await renewals(storage, 3)
        clock.now_s += DEFAULT.end_after_s - 1
        await renewals(storage, 3)
        storage.rename(away)
        await failed(incarnation)
        clock.now_s += DEFAULT.end_after_s + 1
        with pytest.raises(StorageLost, match="could not be renewed in storage for 31 s"):
            await ending
    assert not storage.exists(), "storage that is absent is not created on a local disk"


async def test_a_disk_that_hangs_neither_blocks_the_loop_nor_keeps_the_holder(tmp_path: Path, clock: Clock) -> None:
    async with held(tmp_path, clock) as (incarnation, ending), asyncio.timeout(GUARD_S):
        await renewals(tmp_path, 1)
        # Opening it for reading blocks until somebody opens it for writing.
        pipe = tmp_path / FOLDER / "000000.json"
        newer = tmp_path / FOLDER / "000009.json"
        os.mkfifo(pipe)
        pipe.rename(newer)
        await failed(incarnation)
        clock.now_s += DEFAULT.end_after_s + 1
        try:
            with pytest.raises(StorageLost, match="does not answer"):
                await ending
        finally:
            os.close(os.open(newer, os.O_RDWR | os.O_NONBLOCK))


async def test_storage_that_cannot_be_written_at_the_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageLost, match=r"absent/incarnations cannot be written .*No such file"):
        await Incarnation.take(tmp_path / "absent", OFTEN)


async def test_a_restart_on_the_same_host_after_a_clean_end_does_not_wait(tmp_path: Path, clock: Clock) -> None:
    async with held(tmp_path, clock) as (first, _):
        pass
    await first.end()
    async with held(tmp_path, clock) as (second, _), asyncio.timeout(GUARD_S):
        await second.acquire()
    killed = second
    third = await Incarnation.take(tmp_path, OFTEN, clock=clock)
    waiting = asyncio.create_task(third.acquire())
    assert not (await asyncio.wait([waiting], timeout=0.1))[0], f"incarnation {killed.number} has not ended in order"
    waiting.cancel()


async def test_nobody_waits_for_a_predecessor_of_another_host_that_ended_in_order(tmp_path: Path, clock: Clock) -> None:
    first = await Incarnation.take(tmp_path, OFTEN, clock=clock)
    await first.end()
    path = tmp_path / FOLDER / "000001.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"host": "other", "boot": "another"}))
    second = await Incarnation.take(tmp_path, OFTEN, clock=clock)
    async with asyncio.timeout(GUARD_S):
        await second.acquire()


async def test_an_end_during_a_renewal_is_recorded(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, may_go_on, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        entered.set()
        assert may_go_on.wait(GUARD_S)
        fsync(descriptor)

    async with held(tmp_path, clock) as (incarnation, _):
        monkeypatch.setattr(os, "fsync", slow)
        assert await asyncio.to_thread(entered.wait, GUARD_S)
    ending = asyncio.create_task(incarnation.end())
    await asyncio.sleep(0)
    may_go_on.set()
    await ending
    assert newest_incarnation(tmp_path).ended


async def test_a_holder_that_never_acted_does_not_record_an_end(tmp_path: Path, clock: Clock) -> None:
    """Its predecessor may still act, and the successor must not take its word."""
    await Incarnation.take(tmp_path, OFTEN, clock=clock)
    second = await Incarnation.take(tmp_path, OFTEN, clock=clock)
    await second.end()
    assert not newest_incarnation(tmp_path).ended


async def test_a_fenced_holder_does_not_record_a_clean_end_and_cannot_come_back(tmp_path: Path, clock: Clock) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    first = await Incarnation.take(tmp_path, OFTEN, held=ours, clock=clock)
    second = await Incarnation.take(tmp_path, OFTEN, held=others, clock=clock)
    await first.end()
    assert newest_incarnation(tmp_path) == second.record
    for _ in range(2):
        with pytest.raises(RunFenced, match="incarnation 2 on"):
            await Incarnation.take(tmp_path, OFTEN, held=ours, clock=clock)
    assert newest_incarnation(tmp_path) == second.record
    assert (await Incarnation.take(tmp_path, OFTEN, held=others, clock=clock)).number == 3


async def test_old_files_are_removed(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / FOLDER).mkdir()
    for left in ("000041.json", "000041.json.partial", "000042.json.0a1b.partial", "000043.json.0a1b.partial"):
        (tmp_path / FOLDER / left).touch()
    async with held(tmp_path, clock) as (incarnation, _):
        assert incarnation.number == 42
    for _ in range(2 * FILES_KEPT):
        last = await Incarnation.take(tmp_path, OFTEN, clock=clock)
    names = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert names == [f"{number:06d}.json" for number in range(last.number + 1 - FILES_KEPT, last.number + 1)]


async def test_a_full_disk_of_the_storage_leaves_no_file_that_fences(tmp_path: Path, clock: Clock) -> None:
    ours = tmp_path / "ours"
    await Incarnation.take(tmp_path, OFTEN, held=ours, clock=clock)
    # Room for the number that was held, but not for a record.
    with files_of_at_most(64), pytest.raises(StorageLost, match=r"incarnations cannot be written .*File too large"):
        await Incarnation.take(tmp_path, OFTEN, held=ours, clock=clock)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["000001.json"]
    assert (await Incarnation.take(tmp_path, OFTEN, held=ours, clock=clock)).number == 2


async def test_an_unreadable_file_fences_nothing_once_its_creator_has_had_its_time(
    tmp_path: Path, clock: Clock
) -> None:
    """Earlier versions left an empty file when the disk was full, whatever its time of change is."""
    ours = tmp_path / "ours"
    first = await Incarnation.take(tmp_path, OFTEN, held=ours, clock=clock)
    (tmp_path / FOLDER / "000002.json").touch()
    taking = asyncio.create_task(Incarnation.take(tmp_path, OFTEN, held=ours, sole_on_host=True, clock=clock))
    assert not (await asyncio.wait([taking], timeout=0.1))[0]
    clock.now_s += DEFAULT.takeover_s - 1
    assert not (await asyncio.wait([taking], timeout=0.1))[0]
    clock.now_s += 2
    async with asyncio.timeout(GUARD_S):
        third = await taking
    assert (first.number, third.number) == (1, 3)
    acquiring = asyncio.create_task(third.acquire())
    assert not (await asyncio.wait([acquiring], timeout=0.1))[0], "its creator may act in this very moment"
    acquiring.cancel()


async def test_an_unreadable_file_that_becomes_readable_fences(tmp_path: Path, clock: Clock) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    await Incarnation.take(tmp_path, OFTEN, held=ours, clock=clock)
    await Incarnation.take(tmp_path, OFTEN, held=others, clock=clock)
    path = tmp_path / FOLDER / "000002.json"
    content = path.read_bytes()
    path.write_bytes(content[:40])
    taking = asyncio.create_task(Incarnation.take(tmp_path, OFTEN, held=ours, sole_on_host=True, clock=clock))
    assert not (await asyncio.wait([taking], timeout=0.1))[0]
    path.write_bytes(content)
    with pytest.raises(RunFenced, match="incarnation 2 on"):
        async with asyncio.timeout(GUARD_S):
            await taking


async def test_a_holder_below_an_unreadable_file_ends_in_time_but_not_for_good(tmp_path: Path, clock: Clock) -> None:
    # A renewal has as long as the interval: one that takes longer would be told in place of the file.
    seldom = FenceConfig(renew_s=2.0)
    async with held(tmp_path, clock, seldom) as (incarnation, ending), asyncio.timeout(GUARD_S):
        await renewals(tmp_path, 1)
        (tmp_path / FOLDER / "000002.json").touch()
        await failed(incarnation)
        clock.now_s += DEFAULT.end_after_s - 1
        incarnation.check()
        clock.now_s += 2
        with pytest.raises(StorageLost, match="the file of incarnation 2 cannot be read"):
            await ending


async def test_a_creator_that_was_stopped_for_too_long_does_not_act(tmp_path: Path, clock: Clock) -> None:
    incarnation = await Incarnation.take(tmp_path, OFTEN, clock=clock)
    clock.now_s += DEFAULT.end_after_s + 1
    with pytest.raises(StorageLost):
        await incarnation.acquire()


@pytest.mark.timeout(2 * GUARD_S)
@pytest.mark.parametrize("option", ["", "no-links"])
async def test_a_creator_killed_between_any_two_calls_does_not_fence_its_own_state_folder(
    tmp_path: Path, option: str
) -> None:
    command = (sys.executable, "-m", "support.killed_creator", str(tmp_path), *filter(None, [option]))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said = (await process.communicate())[0].decode().splitlines()
    assert process.returncode == 0
    assert len(said) > 15, "operations of one creator"
    assert {line for line in said if line.endswith("killed")} <= {"takes 2 killed", "takes 3 killed"}
    assert said[-1] == "takes 3 done"


@pytest.mark.timeout(GUARD_S)
async def test_a_stopped_holder_ends_when_it_goes_on_and_names_its_successor(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "support.incarnation_holder", str(tmp_path))
    first = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert first.stdout is not None
    try:
        assert await first.stdout.readline() == b"holding\n"
        first.send_signal(signal.SIGSTOP)
        second = await Incarnation.take(tmp_path, QUICK)
        async with asyncio.TaskGroup() as tasks:
            holding = tasks.create_task(second.hold())
            await second.acquire()
            first.send_signal(signal.SIGCONT)
            said = await first.stdout.read()
            second.check()
            holding.cancel()
    finally:
        with suppress(ProcessLookupError):
            first.kill()
        await first.wait()
    assert said.startswith(b"RunFenced: incarnation 2 on")
