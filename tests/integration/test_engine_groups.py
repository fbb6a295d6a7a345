"""Groups that an engine joins and nobody waits for any more: nothing of them is left. The engine's part is in this
process, rank 0 in another: torch knows one group of a name in a process."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from headrace.policies.cpu_engine.program import CpuEngineConfig, build
from headrace.policies.cpu_engine.requests import InitGroup
from headrace.policies.cpu_engine.update import WeightUpdater
from headrace.policies.errors import GroupFailed, RequestInvalid
from headrace.policies.push.process_group import host_store, join_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ROUNDS = 4
LEADER = """
import sys
from headrace.policies.push.process_group import destroy_group, form_group, host_store

for line in sys.stdin:
    store = host_store("127.0.0.1", 2, 30.0)
    print(store.port, flush=True)
    name = sys.stdin.readline().strip()
    group = form_group(store, name=name, rank=0, world_size=2, backend="gloo", timeout_s=30.0)
    print("formed", flush=True)
    sys.stdin.readline()
    destroy_group(group)
"""


class Leader:
    """Rank 0 of one group after another."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()

    async def hear(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            return (await self._process.stdout.readline()).decode().strip()


@asynccontextmanager
async def leader() -> AsyncIterator[Leader]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LEADER, stdin=pipe, stdout=pipe)
    try:
        yield Leader(process)
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
def updater(tiny_model_dir: Path) -> Callable[[float], WeightUpdater]:
    engine, _ = build(CpuEngineConfig(model=tiny_model_dir))
    return lambda group_timeout_s: WeightUpdater(engine, group_timeout_s=group_timeout_s)


def joining(port: int, name: str) -> InitGroup:
    return InitGroup(
        master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, group_name=name, backend="gloo"
    )


async def until_transfers(count: int) -> None:
    """Until so many threads join or receive."""
    async with asyncio.timeout(60):
        while [thread.name for thread in threading.enumerate()].count("transfer") != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return psutil.Process().num_fds(), psutil.Process().num_threads()


async def until_no_more_than(first: tuple[int, int]) -> None:
    """A thread of the system ends a moment after that of Python."""
    async with asyncio.timeout(60):
        while any(now > before for now, before in zip(held(), first, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_an_engine_leaves_a_group_formed_after_its_client_disconnected(
    updater: Callable[[float], WeightUpdater],
) -> None:
    updates = updater(30.0)
    async with leader() as rank_0:
        for number in range(ROUNDS):
            await rank_0.say("open")
            port = int(await rank_0.hear())
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(updates.init_group(joining(port, f"late{number}")))
                await until_transfers(1)
                asked.cancel()
            await rank_0.say(f"late{number}")
            assert await rank_0.hear() == "formed"
            await until_transfers(0)
            await rank_0.say("leave")
            del asked
            if number == 0:
                first = held()
    # The first round may start what stays.
    await until_no_more_than(first)
    with pytest.raises(RequestInvalid, match="does not exist"):
        await updates.destroy_group("late0")


async def test_a_group_without_rank_0_times_out_and_leaves_nothing_behind(
    updater: Callable[[float], WeightUpdater],
) -> None:
    updates = updater(0.5)
    for number in range(ROUNDS):
        store = host_store("127.0.0.1", 2, 30.0)
        with pytest.raises(GroupFailed, match="within"):
            await updates.init_group(joining(store.port, f"never{number}"))
        await until_transfers(0)
        del store
        if number == 0:
            first = held()
    await until_no_more_than(first)


async def test_opening_the_store_and_the_group_together_stays_within_the_timeout(
    updater: Callable[[float], WeightUpdater], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = threading.Event()

    def late(*arguments: Any) -> TCPStore:
        reached.wait(60)
        return join_store(*arguments)

    monkeypatch.setattr("headrace.policies.cpu_engine.update.join_store", late)
    store = host_store("127.0.0.1", 2, 30.0)
    with pytest.raises(GroupFailed, match=r"within 0\.5 s"):
        await updater(0.5).init_group(joining(store.port, "slow"))
    assert not reached.is_set()
    await until_transfers(1)
    reached.set()
    await until_transfers(0)
