"""How an engine leaves: what it runs ends by itself, or goes on elsewhere.

Invariants:
- Nothing new is sent to it: it is out of the routing table before, and its gate is closed.
- Turns that do not end in time are aborted by a pause that hands over what was sampled, and the gateway goes on with
  them at another engine. Every wait is bounded.
- A server that is not ours is left running, out of the session of a push and unpaused, whatever a push left there.
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
"""How often a leaving engine is asked whether it still runs something."""


async def leave(client: SGLangEngine, gate: GatewayGate, *, timeout_s: float) -> None:
    """Return when the engine runs nothing, or does not answer, or cannot be made to."""
    await gate.close(client.engine_id, 2 * timeout_s)
    with suppress(EngineError):
        # Refused where none is open.
        with suppress(EngineRefused):
            await client.end_update()
        if not await _is_idle(client, timeout_s):
            await client.pause(PauseMode.ABORT)
        await client.resume()
        await _is_idle(client, timeout_s)


async def _is_idle(client: SGLangEngine, timeout_s: float) -> bool:
    """Whether it ran nothing any more within the time. Raises EngineError."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                load = await client.load()
                if not load.running and not load.waiting:
                    return True
                await asyncio.sleep(LOOK_S)
    return False
