"""The gates that a push holds closed.

Invariants:
- A gate is renewed from its closing to its opening, or to the end of the push where it stays closed.
- A renewal and an opening of one gate take turns: what was opened is not closed again by a late renewal.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.policies.engine import EngineId, RequestId
    from headrace.policies.push.contract import Gate


@dataclass(slots=True, kw_only=True)
class _Held:
    """`turn` is held by whoever tells the gate something."""

    closed_at_s: float
    opened_at_s: float | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class HeldGates:
    """Of one push."""

    def __init__(self, gates: Gate, lease_s: float) -> None:
        self._gates = gates
        self._lease_s = lease_s
        self._held: dict[EngineId, _Held] = {}

    async def close(self, engine_id: EngineId) -> None:
        held = self._held[engine_id] = _Held(closed_at_s=time.perf_counter())
        await self._renew(engine_id, held)

    async def open(self, engine_id: EngineId, cache_namespace: str | None) -> Sequence[RequestId]:
        """The requests whose abort is to be sent again."""
        held = self._held.get(engine_id)
        if held is None:
            return await self._gates.open(engine_id, cache_namespace=cache_namespace)
        async with held.turn:
            # Before it is told: who does not wait for the answer must not see it closed again.
            held.opened_at_s = time.perf_counter()
            return await self._gates.open(engine_id, cache_namespace=cache_namespace)

    def closed_s(self, engine_id: EngineId) -> float:
        """How long it was closed, until now where it still is; 0 for one that never was."""
        held = self._held.get(engine_id)
        if held is None:
            return 0.0
        return (held.opened_at_s or time.perf_counter()) - held.closed_at_s

    async def renew(self) -> NoReturn:
        """Again and again, until this is cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            async with asyncio.TaskGroup() as tasks:
                for engine_id, held in self._held.items():
                    tasks.create_task(self._renew(engine_id, held))

    async def _renew(self, engine_id: EngineId, held: _Held) -> None:
        async with held.turn:
            if held.opened_at_s is None:
                await self._gates.close(engine_id, self._lease_s)
