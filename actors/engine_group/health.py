"""Who answers: one look at all engines, and what it means while a push is going on.

Invariants:
- A look never waits longer than the health deadline; engines are asked for their load, which a pause does not hold up.
- Slowness is a failure only when it lasts: `misses` looks in a row. A process that is dead, or an address where nobody
  listens, is one at once.
- While a push is going on, slowness is not held against an engine: the push has deadlines of its own, and a paused
  engine has reasons. A process that is dead is dead at any time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.actors.engine_group.registry import EngineState
from headrace.policies.errors import EngineDown, EngineError
from headrace.policies.transport_errors import reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.actors.engine_group.fleet import Fleet, Member
    from headrace.actors.engine_group.gate import GatewayGate
    from headrace.actors.engine_group.registry import EngineRegistry
    from headrace.policies.engine import EngineId

SILENT_CALLS = 8
"""Turns in a row that an engine left without an answer, to their aborts too: it tells its load and generates
nothing."""


class HealthChecks:
    """Of one group. `pushes` gives a number that a push changes when it begins and when it ends, odd in between."""

    def __init__(
        self,
        fleet: Fleet,
        registry: EngineRegistry,
        gate: GatewayGate,
        *,
        timeout_s: float,
        misses: int,
        pushes: Callable[[], int],
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._gate = gate
        self._timeout_s = timeout_s
        self._misses = misses
        self._pushes = pushes

    async def look(self) -> dict[EngineId, str]:
        """The engines that failed, and why."""
        before = self._pushes()
        # Those in quarantine too: who answers again may be caught up.
        states = (EngineState.WAITING, EngineState.SERVING, EngineState.QUARANTINED)
        asked = [
            self._fleet[entry.engine_id]
            for entry in self._registry.in_state(*states)
            if entry.engine_id in self._fleet.members
        ]
        async with asyncio.TaskGroup() as tasks:
            looking = [tasks.create_task(self._look_at(member)) for member in asked]
            silent = tasks.create_task(self._silent())
        undisturbed = before % 2 == 0 and before == self._pushes()
        failed: dict[EngineId, str] = {}
        for member, answer in zip(asked, looking, strict=True):
            dead, problem = answer.result()
            if problem is None and undisturbed and member.engine_id in silent.result():
                problem = f"{SILENT_CALLS} turns in a row had no end"
            if problem is not None and (dead or undisturbed):
                failed[member.engine_id] = problem
        return failed

    async def _look_at(self, member: Member) -> tuple[bool, str | None]:
        """Whether it is dead, and what is wrong; nothing is wrong with one that left while it was asked."""
        if not await member.body.is_alive():
            return True, "its process is dead"
        problem: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                member.load = await member.client.load()
        except (EngineError, TimeoutError) as error:
            problem = error
        if self._fleet.members.get(member.engine_id) is not member:
            return False, None
        if problem is None:
            self._registry.heard(member.engine_id)
            return False, None
        misses = self._registry.missed(member.engine_id)
        if misses < self._misses and not isinstance(problem, EngineDown):
            return False, None
        return False, f"it did not tell its load, {misses} times in a row: {reason(problem)}"

    async def _silent(self) -> set[str]:
        """Engines that generate nothing any more, as the gateway sees it."""
        stats = await self._gate.stats()
        return set() if stats is None else {engine for engine, calls in stats.silent.items() if calls >= SILENT_CALLS}
