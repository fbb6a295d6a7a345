"""Holder of the gates that a push closes.

Invariants:
- The lease of a gate is renewed from its closing to its opening, or to the end of the push if it stays closed.
- Renewal and opening of one gate exclude each other: a late renewal never closes a gate that was opened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from headrace.policies.engine import EngineId, RequestId
from headrace.policies.push.contract import Gate


@dataclass(slots=True, kw_only=True)
class _Held:
    """Gate that has been closed. `turn` is held during calls to the gateway."""

    closed_at_s: float
    opened_at_s: float | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class HeldGates:
    """Gates that one push has closed."""

    def __init__(self, gates: Gate, lease_s: float) -> None:
        self._gates = gates
        self._lease_s = lease_s
        self._held: dict[EngineId, _Held] = {}

    async def close(self, engine_id: EngineId) -> None:
        held = self._held[engine_id] = _Held(closed_at_s=time.perf_counter())
        await self._renew(engine_id, held)

    async def open(self, engine_id: EngineId, cache_namespace: str | None) -> Sequence[RequestId]:
        """Open a gate, and return the requests that must be aborted again."""
        held = self._held.get(engine_id)
        if held is None:
            return await self._gates.open(engine_id, cache_namespace=cache_namespace)
        async with held.turn:
            # Before the call: even if it is cancelled, the gate must not be closed again.
            held.opened_at_s = time.perf_counter()
            return await self._gates.open(engine_id, cache_namespace=cache_namespace)

    def closed_s(self, engine_id: EngineId) -> float:
        """Return how long a gate was closed, or has been closed so far; 0 if it was never closed."""
        held = self._held.get(engine_id)
        if held is None:
            return 0.0
        return (held.opened_at_s or time.perf_counter()) - held.closed_at_s

    async def renew(self) -> NoReturn:
        """Renew the closed gates periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            async with asyncio.TaskGroup() as tasks:
                for engine_id, held in self._held.items():
                    tasks.create_task(self._renew(engine_id, held))

    async def _renew(self, engine_id: EngineId, held: _Held) -> None:
        async with held.turn:
            if held.opened_at_s is None:
                await self._gates.close(engine_id, self._lease_s)
