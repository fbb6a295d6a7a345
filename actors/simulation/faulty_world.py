"""What outlives simulated actors: disk, wall clock and the host of the sandboxes.

Invariants:
- Work for a thread is done at once, in place: nothing runs beside the loop, so virtual time cannot race ahead.
- What an actor opened on disk is closed when it is killed; its later work there is not done. A full disk refuses all.
- The host takes nothing from the dead, and goes on without its pools.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from typing import TYPE_CHECKING, Any

from headrace.actors.simulation.faulty_runtime import RUNNING, require_alive
from headrace.actors.simulation.ordered_tasks import NumberedFuture
from headrace.actors.simulation.virtual_time import VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.sandboxes.base import Feature, Sandbox, SandboxId, SandboxInfo, SandboxRef, SandboxSpec
    from headrace.sandboxes.simulated.provider import SimulatedProvider

EPOCH_S = 1_700_000_000.0


class FaultyLoop(VirtualTimeLoop):
    """Virtual time with a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.disk_full = False
        self._numbers = itertools.count()

    def create_future(self) -> NumberedFuture:
        return NumberedFuture(next(self._numbers), loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Does the work now. That of a dead actor is cancelled undone."""
        done: asyncio.Future[Any] = self.create_future()
        incarnation = RUNNING.get()
        if incarnation is not None and not incarnation.alive:
            done.cancel()
            return done
        # The service reads and removes files, which a full disk allows; it writes none.
        if self.disk_full and not (incarnation is not None and incarnation.cell.name == "service"):
            done.set_exception(sqlite3.OperationalError("database or disk is full"))
            return done
        try:
            result = work(*arguments)
        except Exception as error:  # noqa: BLE001 - belongs to whoever waits for the thread
            done.set_exception(error)
            return done
        if incarnation is not None and hasattr(result, "close"):
            incarnation.at_death.append(result.close)
        done.set_result(result)
        return done


class WallClock:
    """Unix seconds that people set."""

    def __init__(self) -> None:
        self._offset_s = EPOCH_S

    def time(self) -> float:
        return self._offset_s + asyncio.get_running_loop().time()

    def jump(self, by_s: float) -> None:
        self._offset_s += by_s


class NetworkModel:
    """The way of pools to the host; satisfies `base.SandboxProvider`."""

    def __init__(self, provider: SimulatedProvider) -> None:
        self._provider = provider

    @property
    def features(self) -> frozenset[Feature]:
        return self._provider.features

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        require_alive()
        return await self._provider.create(spec)

    async def attach(self, ref: SandboxRef) -> Sandbox:
        require_alive()
        return await self._provider.attach(ref)

    async def list(self) -> list[SandboxInfo]:
        require_alive()
        return await self._provider.list()

    async def destroy(self, sandbox: SandboxId) -> None:
        require_alive()
        await self._provider.destroy(sandbox)

    async def aclose(self) -> None:
        """The host goes on without this pool."""
