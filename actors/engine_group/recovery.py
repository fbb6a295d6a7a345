"""What a new group does with the engines that outlived the one before.

Invariants:
- Engines on the group's own host died with it, and removed ones stay away: neither is taken over. One that does not
  answer is killed where it is ours, and else in quarantine until it does.
- Every other one leaves the session and the process groups of a push that broke off.
- It goes on serving only if it served, and surely holds one version whole (`BrokenPush.is_whole`): it is resumed, and
  its gate is opened.
- All others are in quarantine, paused if a push had paused them: no traffic before new weights reached them whole.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headrace.actors.engine_group.registry import EngineState
from headrace.policies.errors import EngineError

if TYPE_CHECKING:
    from headrace.actors.engine_group.fleet import Fleet
    from headrace.actors.engine_group.gate import GatewayGate
    from headrace.actors.engine_group.journal import BrokenPush
    from headrace.actors.engine_group.members_file import EngineStatus, Roster
    from headrace.actors.engine_group.pusher import Pusher
    from headrace.actors.engine_group.registry import EngineRegistry
    from headrace.policies.engine import EngineInfo

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
    """Take over every engine that is still there, all at once. `in_place`: pushes keep what is cached."""

    async def one(status: EngineStatus) -> None:
        info = await fleet.adopt(status)
        if info is None:
            return
        groups = () if broken is None else broken.groups.get(status.engine_id, ())
        try:
            await pusher.untangle(status.engine_id, groups)
            if _may_serve(status, broken, info):
                await fleet[status.engine_id].client.resume()
                # Prefixes of other weights may be cached: nothing new shares them.
                namespace = str(info.version) if in_place else None
                await gate.open(status.engine_id, cache_namespace=namespace)
                registry.serves(status.engine_id, info.version)
                return
        except EngineError as error:
            logger.warning("engine %s is caught up before it serves: %s", status.engine_id, error)
        registry.suspect(status.engine_id, "nobody knows which weights it holds")

    async with asyncio.TaskGroup() as tasks:
        for status in roster.engines:
            if status.state is not EngineState.GONE:
                tasks.create_task(one(status))


def _may_serve(status: EngineStatus, broken: BrokenPush | None, info: EngineInfo) -> bool:
    """Whether it served, and holds what it was given: its own version, or that of the push it had taken whole."""
    if status.state is not EngineState.SERVING:
        return False
    if broken is None:
        return str(info.version) == status.version
    known = (status.version, broken.version)
    return str(info.version) in known and broken.is_whole(status.engine_id, info)
