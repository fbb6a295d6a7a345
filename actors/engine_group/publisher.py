"""Publisher of a group's members file and routing tables.

Invariants:
- The members file is written before the gateway gets the table that follows from it.
- Table versions only grow: the high bits are the group's incarnation, which grows with every restart of the group.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.actors.engine_group.members_file import Roster
from headrace.actors.engine_group.registry import EngineState

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.actors.engine_group.fleet import Fleet
    from headrace.actors.engine_group.gate import GatewayGate
    from headrace.actors.engine_group.registry import EngineRegistry

TABLE_NUMBER_BITS = 32
"""Low bits of a table's version: the number of the table. The bits above are the incarnation."""


class Publisher:
    """Publisher of one group."""

    def __init__(self, path: Path, fleet: Fleet, registry: EngineRegistry, gate: GatewayGate) -> None:
        self._path = path
        self._fleet = fleet
        self._registry = registry
        self._gate = gate
        self._incarnation = self._tables = 0
        self._has_serving_engine = False
        self._published = asyncio.Event()

    async def follow(self, roster: Roster) -> None:
        """Take the incarnation after the previous group's."""
        # Either the members file or the gateway's table may have been lost, so both are read.
        stats = await self._gate.stats()
        published = 0 if stats is None else max(0, stats.table_version) >> TABLE_NUMBER_BITS
        self._incarnation = max(roster.incarnation, published) + 1

    async def publish(self) -> None:
        """Write the members file and send the gateway a routing table."""
        self.write_roster()
        self._tables += 1
        await self._gate.route(self._registry.table((self._incarnation << TABLE_NUMBER_BITS) + self._tables))
        self._has_serving_engine = bool(self._registry.in_state(EngineState.SERVING))
        self._published.set()
        self._published = asyncio.Event()

    def write_roster(self) -> None:
        roster = Roster(
            engines=self._fleet.statuses(time.monotonic()),
            started=self._fleet.started,
            retired=frozenset(self._fleet.retired),
            incarnation=self._incarnation,
        )
        roster.write(self._path)

    async def wait_for_serving(self, *, unlike: bool, timeout_s: float) -> bool:
        """Return True if the last table had a serving engine, as soon as that differs from `unlike`, or after
        `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._has_serving_engine is unlike:
                    await self._published.wait()
        return self._has_serving_engine
