"""Health checks of engines, and their meaning during a push.

Invariants:
- A check never waits longer than the health deadline. It asks engines for their load, which a paused engine reports.
- A slow engine fails only after `misses` checks in a row. A dead process, or an address where nothing listens, fails at
  once.
- During a push, slowness is not counted: the push has its own deadlines, and it pauses engines. A dead process counts
  at any time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.actors.engine_group.registry import EngineState
from headrace.policies.errors import EngineDown, EngineError
from headrace.policies.transport_errors import reason

if TYPE_CHECKING:
    from headrace.actors.engine_group.fleet import Fleet, Member
    from headrace.actors.engine_group.gate import GatewayGate
    from headrace.actors.engine_group.pusher import Pusher
    from headrace.actors.engine_group.registry import EngineRegistry
    from headrace.policies.engine import EngineId

SILENT_CALLS = 8
"""An engine fails that left so many turns in a row, and their aborts, without an answer: it reports its load but
generates nothing."""


class HealthChecks:
    """Health checks of one group."""

    def __init__(
        self,
        fleet: Fleet,
        registry: EngineRegistry,
        gate: GatewayGate,
        pusher: Pusher,
        *,
        timeout_s: float,
        misses: int,
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._gate = gate
        self._pusher = pusher
        self._timeout_s = timeout_s
        self._misses = misses

    async def check(self) -> dict[EngineId, str]:
        """Check all engines and return the problem of each that failed."""
        before, disturbed = self._pusher.pushes, self._pusher.is_pushing
        # Engines in quarantine are checked too: one that answers again is pushed to.
        states = (EngineState.WAITING, EngineState.SERVING, EngineState.QUARANTINED)
        asked = [
            self._fleet[entry.engine_id]
            for entry in self._registry.in_state(*states)
            if entry.engine_id in self._fleet.members
        ]
        async with asyncio.TaskGroup() as tasks:
            checks = [tasks.create_task(self._check_one(member)) for member in asked]
            asking_gateway = tasks.create_task(self._gate.stats())
        disturbed = disturbed or before != self._pusher.pushes
        stats = asking_gateway.result()
        failed: dict[EngineId, str] = {}
        for member, answer in zip(asked, checks, strict=True):
            dead, problem = answer.result()
            silent_calls = 0 if stats is None else stats.silent.get(member.engine_id, 0)
            if problem is None and not disturbed and silent_calls >= SILENT_CALLS:
                problem = f"it left {SILENT_CALLS} turns in a row unanswered"
            if problem is not None and (dead or not disturbed):
                failed[member.engine_id] = problem
        return failed

    async def _check_one(self, member: Member) -> tuple[bool, str | None]:
        """Return True if the engine's process is dead, and the engine's problem, if any. An engine that left during the
        check has none."""
        if not await member.handle.is_alive():
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
        return False, f"it did not report its load, {misses} times in a row: {reason(problem)}"
