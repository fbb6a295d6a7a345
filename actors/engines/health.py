"""Health checks of engines, takeover of engines that outlived their group, and draining of engines that leave.

Invariants:
- A check never waits longer than the health deadline. It asks engines for their load, which even a paused engine
  reports.
- A slow engine fails only after `misses` checks in a row. A dead process, or an address where nothing is listening,
  fails immediately.
- During a push, slowness is not counted: the push has its own deadlines, and it pauses engines. A dead process counts
  as a failure at any time.
- An attached engine in quarantine that a push left paused holds no turn: its turns are aborted, and the gateway
  continues them on other engines.
- A router that does not answer changes nothing; a worker that it no longer lists is removed.
- Local engines died with their group, and removed engines stay out: neither is taken over. An engine that does not
  answer is killed if the group started it; an attached one is quarantined until it answers.
- Every other engine leaves the update session and the process groups of an interrupted push.
- An engine continues to serve only if it served before and certainly holds one complete version
  (`BrokenPush.is_whole`): it is resumed, and its gate is opened.
- All others are in quarantine, paused if a push had paused them, and get no traffic until a push to them has succeeded.
- No new requests reach a leaving engine: it is already out of the routing table, and its gate is closed.
- Turns that do not end in time are aborted by a pause that returns the tokens sampled so far, and the gateway continues
  them on another engine. Every wait is bounded.
- An attached server is left running, unpaused and without an open update session, whatever state a push left it in.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import aiohttp
import orjson

from headrace.actors.engines.config import check_url
from headrace.actors.engines.fleet import Fleet, FleetMember
from headrace.actors.engines.gate import GatewayGate
from headrace.actors.engines.journal import BrokenPush
from headrace.actors.engines.members_file import EngineStatus, Roster
from headrace.actors.engines.pusher import Pusher
from headrace.actors.engines.registry import EngineRegistry, EngineState
from headrace.policies.engine import EngineId, PauseMode
from headrace.policies.errors import EngineDown, EngineError, EngineRefused
from headrace.policies.push.resuming import resume
from headrace.policies.sglang.client import SGLangEngine
from headrace.policies.sglang.transport import authorization, reason

SILENT_CALLS = 8
"""Number of consecutive turns that an engine leaves unanswered, along with their aborts, before it fails: such an
engine reports its load but generates nothing."""


class HealthChecks:
    """Health checks of one engine group."""

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

    async def free_held_turns(self) -> None:
        """Abort the turns of engines in quarantine that are paused: nobody resumes them until a push succeeds. Called
        once a table without them is published, so that the turns go on elsewhere. Engines of the group are killed
        instead."""

        async def free(client: SGLangEngine) -> None:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    if await client.is_paused():
                        await client.pause(PauseMode.ABORT)

        async with asyncio.TaskGroup() as tasks:
            for entry in self._registry.in_state(EngineState.QUARANTINED):
                member = self._fleet.members.get(entry.engine_id)
                if member is not None and not entry.origin.is_ours and member.load and member.load.requests:
                    tasks.create_task(free(member.client))

    async def _check_one(self, member: FleetMember) -> tuple[bool, str | None]:
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


logger = logging.getLogger(__name__)

ROUTER_TIMEOUT_S = 5.0


async def router_workers(url: str, http: aiohttp.ClientSession, key: str | None) -> tuple[str, ...] | None:
    """Return the base URLs of the router's workers, or None if the router did not list them. `key` is the router's."""
    workers = url.rstrip("/") + "/workers"
    try:
        async with asyncio.timeout(ROUTER_TIMEOUT_S), http.get(workers, headers=authorization(key)) as response:
            status, payload = response.status, await response.read()
        if status != 200:
            raise ValueError(f"status {status}")
        # Workers for prefill or decode alone cannot be sampled from by themselves.
        workers = orjson.loads(payload)["workers"]
        return tuple(check_url(item["url"]) for item in workers if item.get("worker_type", "regular") == "regular")
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("engines.router %s did not list its workers: %s", url, reason(error))
        return None


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
                await resume(fleet[status.engine_id].client)
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
    """Drain the engine. Returns when the engine is idle, does not answer, or `timeout_s` has passed twice."""
    await gate.close(client.engine_id, 2 * timeout_s)
    with suppress(EngineError):
        # The engine refuses where no session is open.
        with suppress(EngineRefused):
            await client.end_update()
        if not await _is_idle(client, timeout_s):
            await client.pause(PauseMode.ABORT)
        await resume(client)
        await _is_idle(client, timeout_s)


async def _is_idle(client: SGLangEngine, timeout_s: float) -> bool:
    """Return True as soon as the engine is idle, False after `timeout_s`. Raises EngineError."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                load = await client.load()
                if not load.running and not load.waiting:
                    return True
                await asyncio.sleep(LOOK_S)
    return False
