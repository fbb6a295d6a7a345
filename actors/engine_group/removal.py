"""Removal of an engine: its requests finish, or continue on another engine.

Invariants:
- No new requests reach it: it is already out of the routing table, and its gate is closed.
- Turns that do not end in time are aborted by a pause that returns the tokens sampled so far, and the gateway continues
  them on another engine. Every wait is bounded.
- An attached server is left running, unpaused and without an open update session, whatever state a push left it in.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.policies.engine import PauseMode
from headrace.policies.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from headrace.actors.engine_group.gate import GatewayGate
    from headrace.policies.sglang.client import SGLangEngine

LOOK_S = 0.2
"""Interval between requests for the load of a leaving engine."""


async def leave(client: SGLangEngine, gate: GatewayGate, *, timeout_s: float) -> None:
    """Drain the engine. Returns when it runs nothing, does not answer, or `timeout_s` passed twice."""
    await gate.close(client.engine_id, 2 * timeout_s)
    with suppress(EngineError):
        # The engine refuses where no session is open.
        with suppress(EngineRefused):
            await client.end_update()
        if not await _is_idle(client, timeout_s):
            await client.pause(PauseMode.ABORT)
        await client.resume()
        await _is_idle(client, timeout_s)


async def _is_idle(client: SGLangEngine, timeout_s: float) -> bool:
    """Return True as soon as the engine runs nothing, False after `timeout_s`. Raises EngineError."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                load = await client.load()
                if not load.running and not load.waiting:
                    return True
                await asyncio.sleep(LOOK_S)
    return False
