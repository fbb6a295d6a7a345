"""Engines that die in a push by disk, with the group going on: the others serve, and directories are kept as needed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.buffer.primitives.circuit_breaker import CircuitBreaker
from headrace.policies.push.machine import GROUP_PHASES, Phase
from support import group_rig as kit

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [kit.write_weights(folder / str(seed), seed) for seed in range(2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[kit.Rig]:
    """Two engines of ours behind a gateway; breakers that allow every try, for engines die here all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.2)
        patch.setattr(CircuitBreaker, "allows", lambda *_: True)
        push = {"transport": "disk", "phase_timeout_s": 8.0, "read_timeout_s": 10.0}
        folder = tmp_path_factory.mktemp("run")
        async with kit.open_group(models[0], folder, push=push, count=2, health_timeout_s=3.0) as rig:
            await rig.push(models[0], 0)
            rig.step = 0
            yield rig


async def next_push(rig: kit.Rig, models: list[Path]) -> str:
    """Other weights than before; their version."""
    rig.step += 1
    await rig.push(models[rig.step % 2], rig.step)
    return f"1.{rig.step}"


PHASES = [phase for phase in Phase if phase not in GROUP_PHASES]
SLOW = {Phase.PROBE, Phase.GATE, Phase.FLUSH, Phase.RESUME}


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=[pytest.mark.slow] if phase in SLOW else []) for phase in PHASES]
)
async def test_a_push_by_disk_survives_the_death_of_an_engine(rig: kit.Rig, models: list[Path], phase: Phase) -> None:
    engines = await rig.until_serving(2, f"1.{rig.step}")
    name = next(iter(engines))
    process_id = engines[name].process_id
    assert process_id is not None

    async def kill() -> None:
        os.kill(process_id, signal.SIGKILL)

    rig.before(0, phase, kill)
    async with asyncio.TaskGroup() as tasks:
        turns = [tasks.create_task(rig.turn(60)) for _ in range(3)]
        version = await next_push(rig, models)
        assert kit.versions_of(await rig.turn()) == {version}
    assert not any(turn.result().failures for turn in turns)
    # After its weights were compared it dies as an engine that serves.
    await rig.until(lambda now: name not in now)
    await rig.until_serving(2, version)


async def test_a_failing_journal_ends_a_push_by_disk_and_the_supervision_repeats_it(
    rig: kit.Rig, models: list[Path]
) -> None:
    async def fail() -> None:
        raise OSError("the disk is full")

    await rig.until_serving(2, f"1.{rig.step}")
    rig.before(0, Phase.BROADCAST, fail)
    with pytest.raises(OSError, match="the disk is full"):
        await next_push(rig, models)
    await rig.until_serving(2, f"1.{rig.step}")
    assert kit.versions_of(await rig.turn()) == {f"1.{rig.step}"}


async def test_an_attached_engine_gets_the_newest_weights_by_disk(models: list[Path], tmp_path: Path) -> None:
    push = {"transport": "disk"}
    async with (
        kit.servers(models[0], tmp_path, "a") as servers,
        kit.open_group(models[0], tmp_path, push=push, count=1) as rig,
    ):
        await rig.push(models[1], 1)
        name = await rig.group.add(servers["a"].url)
        engines = await rig.until_serving(2, "1.1")
        assert name in engines
        assert sorted(path.name for path in (tmp_path / "engines" / "weights").iterdir()) == ["1.1"]
