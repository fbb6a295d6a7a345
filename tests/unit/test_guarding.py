"""Guards of actors in virtual time: who is killed, who is waited for, and what a pause does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.record.files.absences import Absences
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import load_recipe
from headrace.actors.run.parts import RunActors, periodic_evaluations
from headrace.actors.runtime.actors.call_guard import AwakeClock, guard
from headrace.actors.runtime.actors.operations import ABSENCE
from headrace.actors.simulation.virtual.virtual_time import VirtualTimeLoop, run_virtual
from headrace.buffer.core.task_catalog import TaskCatalog

HANG_S = 60.0
RECIPE = Path(__file__).parents[2] / "scripts" / "recipes" / "simulated.toml"


class Watched:
    """A runtime of one actor, which answers as `state` says."""

    def __init__(self) -> None:
        self.state = "well"
        self.changed = asyncio.Event()
        self.killed_s: list[float] = []

    async def stats(self, actor: object) -> tuple[int, int]:
        await asyncio.sleep(0.5)
        while self.state == "hangs":
            await self.changed.wait()
        if self.state == "lost":
            raise ActorLost("actor replay is gone or restarting")
        return 7, 0

    async def restart(self, actor: object, process_id: int) -> None:
        self.killed_s.append(asyncio.get_running_loop().time())
        self.become("well")

    def become(self, state: str) -> None:
        self.state = state
        self.changed.set()
        self.changed.clear()


def pause(seconds: float) -> None:
    """The machine stops, and its clock goes on."""
    loop: Any = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop._now_s += seconds


async def watch(*changes: tuple[float, Any], absences: Absences | None = None) -> Watched:
    """A guarded actor, to which these changes happen at these times."""
    watched = Watched()
    async with asyncio.TaskGroup() as tasks:
        guarding = tasks.create_task(guard(watched, "replay", object(), HANG_S, absences=absences, role="control"))
        for at_s, change in changes:
            await asyncio.sleep(at_s - asyncio.get_running_loop().time())
            change(watched)
        await asyncio.sleep(3 * HANG_S)
        guarding.cancel()
    return watched


def test_a_hung_actor_is_killed_once() -> None:
    watched = run_virtual(watch((10.0, lambda watched: watched.become("hangs"))))
    assert len(watched.killed_s) == 1
    assert HANG_S - 1 <= watched.killed_s[0] - 10.0 <= HANG_S + 5


def test_a_lost_actor_is_listed_as_absent_until_it_is_back() -> None:
    absences, listed = Absences(None, clock=lambda: 7.0), {}

    def look(at_s: int) -> Any:
        return lambda _: listed.update({at_s: [one.line(19.0) for one in absences.all()]})

    run_virtual(
        watch(
            (10.0, lambda watched: watched.become("lost")),
            (20.0, look(20)),
            (21.0, lambda watched: watched.become("well")),
            (30.0, look(30)),
            absences=absences,
        )
    )
    assert listed == {20: ["replay (since 12 s, on a control node)"], 30: []}


@pytest.mark.parametrize("seconds", [HANG_S + 1, 3600.0])
def test_a_pause_of_the_machine_kills_no_actor(seconds: float) -> None:
    pauses = ((at_s, lambda _: pause(seconds)) for at_s in (10.0, 12.3, 14.1))
    asked = ((20.0, lambda watched: watched.become("hangs")), (21.0, lambda _: pause(seconds)))
    back = ((40.0, lambda watched: watched.become("well")),)
    assert run_virtual(watch(*((at_s, change) for at_s, change in pauses))).killed_s == []
    assert run_virtual(watch(*asked, *((at_s + seconds, change) for at_s, change in back))).killed_s == []


def test_the_guard_waits_for_a_lost_actor_to_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ABSENCE, "seconds", 100.0)
    lost, back = (10.0, lambda watched: watched.become("lost")), (100.0, lambda watched: watched.become("well"))
    assert run_virtual(watch(lost, back)).killed_s == []
    with pytest.raises(ExceptionGroup) as end:
        run_virtual(watch(lost))
    [gone] = end.value.exceptions
    assert isinstance(gone, ActorGone)
    assert "did not come back within 100 s (cluster.absent_s)" in str(gone)


def test_time_paused_is_not_counted() -> None:
    clock = AwakeClock(10.0)
    assert [clock.read(now_s) for now_s in (100.0, 105.0, 119.0, 719.0, 720.0)] == [100.0, 105.0, 119.0, 119.0, 120.0]
    assert clock.paused_within(30.0) == 600.0
    assert clock.paused_within(0.5) == 0.0


class Parts(RunActors):
    """Starts three actors, of which the last fails."""

    async def start(self) -> None:
        async with self.starting():
            for name in ("found", "new", "broken"):
                await self.spawn(name, object)


class Spawning:
    """A runtime in which one actor lives already, and one cannot start."""

    def __init__(self) -> None:
        self.stopped: list[object] = []

    async def spawn(self, cls: type, *args: object, name: str, **kwargs: object) -> str:
        if name == "broken":
            raise ActorLost("no")
        return name

    def found(self, actor: object) -> bool:
        return actor == "found"

    async def stop(self, actor: object) -> None:
        self.stopped.append(actor)


async def test_a_service_that_fails_to_start_stops_only_what_it_started(tmp_path: Path) -> None:
    runtime, directory = Spawning(), RunDirectory(path=tmp_path)
    config = load_recipe(RECIPE, (), tmp_path)
    parts = Parts(config, directory, runtime, evaluations=periodic_evaluations(config, directory), tasks=TaskCatalog())
    with pytest.raises(ActorLost):
        await parts.start()
    assert runtime.stopped == ["new"]
