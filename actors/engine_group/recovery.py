"""Takeover of the engines that outlived the previous engine group.

Invariants:
- Local engines died with their group, and removed engines stay out: neither is taken over. An engine that does not
  answer is killed where it is ours; an attached one is quarantined until it answers.
- Every other engine leaves the update session and the process groups of an interrupted push.
- An engine continues to serve only if it served before and certainly holds one complete version
  (`BrokenPush.is_whole`): it is resumed, and its gate is opened.
- All others are in quarantine, paused if a push had paused them, and get no traffic until a push to them succeeded.
- No new requests reach it: it is already out of the routing table, and its gate is closed.
- Turns that do not end in time are aborted by a pause that returns the tokens sampled so far, and the gateway continues
  them on another engine. Every wait is bounded.
- An attached server is left running, unpaused and without an open update session, whatever state a push left it in.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.actors.engine_group.registry import EngineState
from headrace.policies.engine import PauseMode
from headrace.policies.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from headrace.actors.engine_group.fleet import Fleet
    from headrace.actors.engine_group.gate import GatewayGate
    from headrace.actors.engine_group.journal import BrokenPush
    from headrace.actors.engine_group.members_file import EngineStatus, Roster
    from headrace.actors.engine_group.pusher import Pusher
    from headrace.actors.engine_group.registry import EngineRegistry
    from headrace.policies.sglang.client import SGLangEngine

logger = logging.getLogger(__name__)


async def recover(
    roster: Roster,
    broken: BrokenPush | None,
    fleet: Fleet,
    registry: EngineRegistry,
    pusher: Pusher,
    gate: GatewayGate,
    *,
    in_place: bool,
) -> None:
    """Take over all engines that are still running, concurrently. With `in_place`, pushes keep cached prefixes."""

    async def one(status: EngineStatus) -> None:
        info = await fleet.adopt(status)
        if info is None:
            return
        groups = () if broken is None else broken.groups.get(status.engine_id, ())
        try:
            await pusher.untangle(status.engine_id, groups)
            version = str(info.version)
            # An interrupted push may have updated the engine already.
            is_known = version == status.version or (broken is not None and version == broken.version)
            is_whole = broken is None or broken.is_whole(status.engine_id, info)
            if status.state is EngineState.SERVING and is_known and is_whole:
                await fleet[status.engine_id].client.resume()
                # Cached prefixes of other weights must not be shared by new requests.
                namespace = str(info.version) if in_place else None
                await gate.open(status.engine_id, cache_namespace=namespace)
                registry.serves(status.engine_id, info.version)
                return
        except EngineError as error:
            logger.warning("engine %s gets new weights before it serves: %s", status.engine_id, error)
        registry.suspect(status.engine_id, "its weights are unknown")

    async with asyncio.TaskGroup() as tasks:
        for status in roster.engines:
            if status.state is not EngineState.GONE:
                tasks.create_task(one(status))


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
