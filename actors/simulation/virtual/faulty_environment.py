"""Faulty disk, wall clock and sandbox host, which outlive the simulated actors.

Invariants:
- Work for a thread is executed immediately in the event loop, so that virtual time cannot advance in the meantime.
- Files that an actor opened are closed when it is killed, and its later work on them is cancelled. A full disk refuses
  all work.
- The host ignores requests of killed actors, and keeps running without its pools.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Callable
from typing import Any

from headrace.actors.simulation.virtual.faulty_runtime import RUNNING, NumberedFuture, require_alive
from headrace.actors.simulation.virtual.virtual_time import VirtualTimeLoop
from headrace.sandboxes.base import Feature, Sandbox, SandboxId, SandboxInfo, SandboxRef, SandboxSpec
from headrace.sandboxes.simulated.provider import SimulatedProvider

EPOCH_S = 1_700_000_000.0


class FaultyLoop(VirtualTimeLoop):
    """Virtual-time event loop with a disk that can be full."""

    def __init__(self) -> None:
        super().__init__()
        self.disk_full = False
        self._numbers = itertools.count()

    def create_future(self) -> NumberedFuture:
        return NumberedFuture(next(self._numbers), loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Execute the work immediately; the work of a killed actor is cancelled instead."""
        done: asyncio.Future[Any] = self.create_future()
        incarnation = RUNNING.get()
        if incarnation is not None and not incarnation.alive:
            done.cancel()
            return done
        # The service only reads and removes files, which is possible on a full disk.
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
    """Wall clock in Unix seconds, which can jump."""

    def __init__(self) -> None:
        self._offset_s = EPOCH_S

    def time(self) -> float:
        return self._offset_s + asyncio.get_running_loop().time()

    def jump(self, by_s: float) -> None:
        self._offset_s += by_s


class NetworkModel:
    """Network between the pools and the host; satisfies `base.SandboxProvider`."""

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
        """Do nothing: the host keeps running without this pool."""
