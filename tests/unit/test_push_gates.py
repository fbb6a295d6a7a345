"""The gates of a push: renewed while they are held, and never closed again once they are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.policies.engine import EngineId, RequestId
from headrace.policies.push.execution import HeldGates

ONE, TWO = EngineId("one"), EngineId("two")


@dataclass
class SlowGate:
    """A gateway that takes its time to close while `quick` is not set."""

    log: list[str] = field(default_factory=list)
    quick: asyncio.Event = field(default_factory=asyncio.Event)

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        self.log.append(f"closing {engine_id}")
        await self.quick.wait()
        self.log.append(f"closed {engine_id}")

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> list[RequestId]:
        self.log.append(f"open {engine_id}")
        return [RequestId("lost")]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def test_a_late_renewal_does_not_close_a_reopened_gate() -> None:
    gate = SlowGate()
    gate.quick.set()
    held = HeldGates(gate, lease_s=0.01)
    async with asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(held.renew())
        await held.close(ONE)
        gate.quick.clear()
        await until(lambda: gate.log[-1] == "closing one")
        opening = tasks.create_task(held.open(ONE, None))
        await held_up(opening)
        gate.quick.set()
        assert await opening == ["lost"]
        closed_s = held.closed_s(ONE)
        await held.close(TWO)
        await until(lambda: gate.log.count("closed two") > 2)
        renewing.cancel()
    assert gate.log.index("open one") == max(at for at, what in enumerate(gate.log) if what == "closed one") + 1
    assert gate.log.count("closing one") == gate.log.count("closed one")
    assert held.closed_s(ONE) == closed_s, "it stands still once the gate is open"


async def held_up(task: asyncio.Task[object]) -> None:
    """Let the task run as far as it comes; it does not end."""
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
