"""Engines that die, hang, stall or are slow in a push, with the group going on: each within a deadline."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.actors.engines.members_file import read_roster
from headrace.actors.engines.registry import EngineState
from headrace.buffer.primitives.circuit_breaker import CircuitBreaker
from headrace.policies.push.machine import Phase
from headrace.serve.gateway.capture.session import Budgets, Sampling, SessionId, SessionSpec
from support import group_rig as kit

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [kit.write_weights(folder / str(seed), seed) for seed in range(2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """Two engines of ours behind a gateway; breakers that allow every try, for engines die here all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.2)
        patch.setattr(CircuitBreaker, "allows", lambda *_: True)
        options = {"count": 2, "health_timeout_s": 3.0}
        push = {"phase_timeout_s": 8.0, "transfer_timeout_s": 10.0}
        folder = tmp_path_factory.mktemp("run")
        async with kit.open_group(models[0], folder, push=push, **options) as rig:
            await rig.push(models[0], 0)
            rig.step = 0
            yield rig


async def next_push(rig: Any, models: list[Path]) -> str:
    """Other weights than before; their version."""
    rig.step += 1
    await rig.push(models[rig.step % 2], rig.step)
    return f"1.{rig.step}"


async def first_of(rig: Any) -> tuple[str, int]:
    """Name and process of the engine that the next push begins with."""
    engines = await rig.until_serving(2, f"1.{rig.step}")
    name = next(iter(engines))
    return name, engines[name].process_id


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("phase", list(Phase))
async def test_a_push_survives_the_death_of_an_engine(rig: Any, models: list[Path], phase: Phase) -> None:
    name, process_id = await first_of(rig)

    async def kill() -> None:
        os.kill(process_id, signal.SIGKILL)

    rig.before(0, phase, kill)
    async with asyncio.TaskGroup() as tasks:
        turns = [tasks.create_task(rig.turn(60)) for _ in range(3)]
        version = await next_push(rig, models)
        assert kit.versions_of(await rig.turn()) == {version}
    assert not any(turn.result().failures for turn in turns)
    # After the last bucket it dies as an engine that serves.
    await rig.until(lambda engines: name not in engines)
    await rig.until_serving(2, version)


@pytest.mark.parametrize("phase", [Phase.BEGIN, Phase.BROADCAST, Phase.END, Phase.DISBAND])
async def test_a_push_raises_if_its_journal_fails(rig: Any, models: list[Path], phase: Phase) -> None:
    """Whoever was sent something is out of routing with the failure; the supervision brings the others up to date."""
    name, _ = await first_of(rig)

    async def fail() -> None:
        raise OSError("the disk is full")

    rig.before(0, phase, fail)
    async with asyncio.TaskGroup() as tasks:
        turns = [tasks.create_task(rig.turn(60)) for _ in range(3)]
        with pytest.raises(OSError, match="the disk is full"):
            await next_push(rig, models)
        admitted = [route.engine_id for route in rig.group._registry.table(0).engines if route.admitted]
    assert (name in admitted) == (phase is Phase.BEGIN)
    assert not any(turn.result().failures for turn in turns)
    version = f"1.{rig.step}"
    await rig.until_serving(2, version)
    assert kit.versions_of(await rig.turn()) == {version}


async def test_no_engine_is_lost_when_the_sender_dies_repeatedly(rig: Any, models: list[Path]) -> None:
    """They are well, and hold their old weights whole: the push is tried again with them."""
    before = await rig.until_serving(2, f"1.{rig.step}")
    senders: set[int] = set()

    async def kill() -> None:
        senders.add(rig.group._sender.pid)
        os.kill(rig.group._sender.pid, signal.SIGKILL)
        if len(senders) < 2:
            rig.before(0, Phase.BEGIN, kill)

    rig.before(0, Phase.BEGIN, kill)
    version = await next_push(rig, models)
    after = await rig.until_serving(2, version)
    assert len(senders) == 2
    assert {name: engine.process_id for name, engine in after.items()} == {
        name: engine.process_id for name, engine in before.items()
    }


@pytest.mark.parametrize("phase", [Phase.PAUSE, pytest.param(Phase.END, marks=pytest.mark.slow)])
async def test_an_engine_that_never_answers_is_replaced(rig: Any, models: list[Path], phase: Phase) -> None:
    """F8."""
    name, process_id = await first_of(rig)

    async def stop() -> None:
        os.kill(process_id, signal.SIGSTOP)

    rig.before(0, phase, stop)
    version = await next_push(rig, models)
    assert kit.versions_of(await rig.turn()) == {version}
    assert name not in await rig.until_serving(2, version)


async def test_a_failure_is_counted_once_and_recorded_before_the_push_ends(models: list[Path], tmp_path: Path) -> None:
    async with kit.open_group(models[0], tmp_path, count=2) as rig:
        await rig.push(models[0], 0)
        name, engine = next(iter((await rig.until_serving(2, "1.0")).items()))
        known: list[str] = []

        async def look() -> None:
            known.append((await rig.engines())[name].state)
            roster = read_roster(tmp_path / "engines" / "members.json")
            known.extend(engine.state for engine in roster.engines if engine.engine_id == name)

        async def kill() -> None:
            os.kill(engine.process_id, signal.SIGKILL)
            rig.before(1, Phase.PROBE, look)

        rig.before(0, Phase.BEGIN, kill)
        await rig.push(models[1], 1)
        assert known == [EngineState.QUARANTINED] * 2, "in memory, and on disk for a group that follows"
        await rig.until_serving(2, "1.1")
        assert len(rig.group._registry.breaker(engine.place)._failed_at_s) == 1


@pytest.mark.slow
async def test_engines_that_fail_push_after_push_do_not_end_the_run(models: list[Path], tmp_path: Path) -> None:
    """F8: Where no engine is left, a place whose breaker is open is tried at once."""
    async with kit.open_group(models[0], tmp_path, count=1) as rig:
        await rig.push(models[0], 0)
        for step in range(1, 5):
            [engine] = (await rig.until_serving(1, f"1.{step - 1}")).values()

            async def kill(process_id: int = engine.process_id) -> None:
                os.kill(process_id, signal.SIGKILL)

            rig.before(0, Phase.BROADCAST, kill)
            await rig.push(models[step % 2], step)
        [replaced] = (await rig.until_serving(1, "1.4")).values()
        assert replaced.process_id != engine.process_id


async def test_routing_tables_are_published_while_a_push_holds_the_lock(models: list[Path], tmp_path: Path) -> None:
    async with kit.open_group(models[0], tmp_path, count=1) as rig, rig.group._lock:
        roster = tmp_path / "engines" / "members.json"
        for _ in range(2):
            # The supervision may tell it once, before it waits for the lock itself.
            written = roster.stat().st_mtime_ns

            async def is_told(before: int = written) -> bool:
                return roster.stat().st_mtime_ns != before

            await kit.until(is_told)
            assert roster.stat().st_mtime_ns != written


async def test_health_checks_that_time_out_during_a_pause_kill_no_engine(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.1)
    options = {"count": 1, "health_timeout_s": 0.3}
    async with kit.open_group(models[0], tmp_path, push={"phase_timeout_s": 60.0}, **options) as rig:
        await rig.push(models[0], 0)
        [(name, engine)] = (await rig.until_serving(1, "1.0")).items()

        async def stall() -> None:
            os.kill(engine.process_id, signal.SIGSTOP)
            await rig.until(lambda now: now[name].misses >= 3)
            os.kill(engine.process_id, signal.SIGCONT)
            await rig.until(lambda now: now[name].misses == 0)

        rig.before(0, Phase.BEGIN, stall)
        await rig.push(models[1], 1)
        [after] = (await rig.until_serving(1, "1.1")).values()
        assert (after.engine_id, after.process_id) == (name, engine.process_id)
        assert (0, "open") in rig.journal


async def test_a_temporarily_slow_engine_is_not_killed(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It misses health checks in a row, fewer than `health_misses`."""
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.1)
    options = {"count": 1, "health_timeout_s": 0.3, "health_misses": 100}
    async with kit.open_group(models[0], tmp_path, **options) as rig:
        await rig.push(models[0], 0)
        [(name, engine)] = (await rig.until_serving(1, "1.0")).items()
        os.kill(engine.process_id, signal.SIGSTOP)
        await rig.until(lambda now: now[name].misses >= 3)
        assert (await rig.engines())[name].state is EngineState.SERVING
        os.kill(engine.process_id, signal.SIGCONT)
        await rig.until(lambda now: now[name].misses == 0)
        [after] = (await rig.until_serving(1, "1.0")).values()
        assert (after.engine_id, after.process_id) == (name, engine.process_id)


async def test_an_engine_that_stays_silent_is_replaced(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.1)
    options = {"count": 1, "health_timeout_s": 0.3, "health_misses": 3}
    async with kit.open_group(models[0], tmp_path, **options) as rig:
        await rig.push(models[0], 0)
        [(name, engine)] = (await rig.until_serving(1, "1.0")).items()
        os.kill(engine.process_id, signal.SIGSTOP)
        await rig.until(lambda now: name not in now)
        [replaced] = (await rig.until_serving(1, "1.0")).values()
        assert replaced.process_id != engine.process_id


async def test_a_request_that_arrives_and_is_aborted_during_a_pause_ends(models: list[Path], tmp_path: Path) -> None:
    # An agent that left is waited for, so that only the abort can end its turn.
    gateway = {"abort_grace_s": 50.0}
    async with kit.open_group(models[0], tmp_path, count=1, gateway=gateway) as rig:
        await rig.push(models[0], 0)
        [name] = await rig.until_serving(1, "1.0")
        client = rig.group._fleet[name].client
        spec = SessionSpec(
            session_id=SessionId("late"),
            sampling=Sampling(),
            budgets=Budgets(max_tokens_per_turn=900, max_context_tokens=1024),
        )
        opened = await rig.client.open(spec)

        async def waits() -> bool:
            return (await client.load()).waiting > 0

        async def is_idle() -> bool:
            load = await client.load()
            return not load.running and not load.waiting

        async def arrive_late() -> None:
            # As a request does that had passed the gate, and was on its way when it closed.
            await rig.group._gate.open(name, cache_namespace=None)
            body = {"messages": [{"role": "user", "content": "write alpha to a.txt"}]}
            leaving = asyncio.ensure_future(rig.http.post(f"{opened.base_url}/v1/chat/completions", json=body))
            await kit.until(waits)
            await rig.group._gate.close(name, 60.0)
            leaving.cancel()

        rig.before(0, Phase.BEGIN, arrive_late)
        await rig.push(models[1], 1)
        await kit.until(is_idle)
        report = await rig.client.finish(SessionId("late"))
        assert report.sampled_tokens < 900


@asynccontextmanager
async def many_engines(
    model: Path, folder: Path, *, processes: int, each: int, slow_s: float
) -> AsyncIterator[list[str]]:
    """URLs of engines, neighbours in different processes; the first one is slow."""
    files = [folder / f"many-{index}.json" for index in range(processes)]
    async with AsyncExitStack() as stack:
        for index, file in enumerate(files):
            command = [
                sys.executable,
                "-m",
                "support.many_engines",
                str(model),
                str(file),
                str(each),
                str(0 if index else slow_s),
            ]
            process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)

        async def announced() -> bool:
            return all(file.exists() for file in files)

        await kit.until(announced)
        columns = [json.loads(file.read_text()) for file in files]
        yield [url for row in zip(*columns, strict=True) for url in row]


@pytest.mark.timeout(300)
async def test_one_slow_engine_of_twenty_does_not_delay_the_others(models: list[Path], tmp_path: Path) -> None:
    push = {"wave_size": 4, "bucket_bytes": 1 << 25, "phase_timeout_s": 60.0, "transfer_timeout_s": 60.0}
    async with (
        many_engines(models[0], tmp_path, processes=4, each=5, slow_s=0.3) as urls,
        kit.open_group(models[0], tmp_path, push=push, count=0, attach=urls) as rig,
    ):
        await rig.push(models[0], 0)
        served: list[Any] = []

        async def serve() -> None:
            while True:
                served.append(await rig.turn(8))

        async with asyncio.TaskGroup() as tasks:
            serving = [tasks.create_task(serve()) for _ in range(4)]
            before = len(served)
            await rig.push(models[1], 1)
            during = len(served) - before
            for task in serving:
                task.cancel()
        assert during > 0, "the others serve meanwhile"
        assert not any(report.failures for report in served)
        engines = await rig.engines()
        states = {engine.url: (engine.state, engine.version) for engine in engines.values()}
        # Slow, and well within every deadline: that is no failure.
        assert states == dict.fromkeys(urls, (EngineState.SERVING, "1.1"))
        assert kit.versions_of(await rig.turn()) == {"1.1"}
