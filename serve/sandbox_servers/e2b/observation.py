"""Control-plane routes for metrics, logs, snapshots and the network, and for unsupported features.

Invariants: numbers come from the provider or are omitted; an unsupported request results in an error that names it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from headrace.sandboxes.base import Feature, ImageRef
from headrace.sandboxes.errors import SandboxError, SandboxGone
from headrace.sandboxes.local.provider import LocalProvider
from headrace.serve.sandbox_servers.e2b.envd import Authentication
from headrace.serve.sandbox_servers.e2b_state.bodies import Egress, NewSnapshot, read_body, timestamp, without_network
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, not_found, unsupported
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.e2b_state.lifecycle import Sandboxes, spec_of
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import CpuSample, LiveSandbox
from headrace.serve.sandbox_servers.e2b_state.table import SandboxSnapshot, State

_MAX_METRICS: Final = 100
_FAMILIES: Final = ("templates", "volumes", "volumecontent", "secrets", "teams", "nodes", "events")


class ObservationRoutes:
    """Handlers for the routes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    def routes(self, access: Authentication) -> list[web.RouteDef]:
        one, owned, on = "/sandboxes/{id}", access.owned, access.on_sandbox
        named = [
            web.get("/sandboxes/metrics", owned(self._metrics_of_many)),
            web.get(f"{one}/metrics", on(self._metrics)),
            web.get(f"{one}/logs", on(self._logs)),
            web.get(f"/v2{one}/logs", on(self._logs)),
            web.put(f"{one}/network", on(self._network)),
            web.post(f"{one}/snapshots", on(self._snapshot)),
            web.post(f"{one}/fork", on(self._fork)),
            web.get("/snapshots", owned(self._snapshots)),
            web.delete("/templates/{id}", owned(self.delete_snapshot)),
        ]
        versions = ("", "/v2", "/v3")
        refused = [
            web.route("*", f"{version}/{family}{{rest:(/.*)?}}", owned(_refuse))
            for family in _FAMILIES
            for version in versions
        ]
        return named + refused

    async def _metrics(self, request: web.Request, live: LiveSandbox) -> web.Response:
        return web.json_response([await sample(live)] if self._has(Feature.USAGE) else [])

    async def _metrics_of_many(self, request: web.Request, owner: Owner) -> web.Response:
        names = [name for name in request.query.get("sandbox_ids", "").split(",") if name]
        if not names or len(names) > _MAX_METRICS:
            raise ApiError(400, f"sandbox_ids: must name 1 to {_MAX_METRICS} sandboxes")
        found = {}
        for name in names if self._has(Feature.USAGE) else ():
            try:
                found[name] = await sample(self._sandboxes.get(owner, name))
            except (ApiError, SandboxGone):
                continue
        return web.json_response({"sandboxes": found})

    def _has(self, feature: Feature) -> bool:
        return feature in self._sandboxes.backend.features

    async def _logs(self, request: web.Request, live: LiveSandbox) -> web.Response:
        try:
            since_s = int(request.query.get("start", "0")) / 1000
        except ValueError as error:
            raise ApiError(400, "start: must be Unix time in milliseconds") from error
        events = [event for event in live.events if event.at >= since_s]
        entries = [event.to_json() for event in events]
        if request.path.startswith("/v2"):
            return web.json_response({"logs": entries})
        return web.json_response({"logs": [event.to_line() for event in events], "logEntries": entries})

    async def _network(self, request: web.Request, live: LiveSandbox) -> web.Response:
        # Whatever is denied is denied already.
        return web.Response(status=204, headers=without_network(request, await read_body(request, Egress)))

    async def _fork(self, request: web.Request, live: LiveSandbox) -> web.Response:
        raise unsupported("fork")

    async def _snapshot(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, NewSnapshot)
        if not self._has(Feature.SNAPSHOT):
            raise unsupported("a snapshot")
        taken = await asyncio.shield(self._sandboxes.tasks.share(take_snapshot(self._sandboxes, live, body.name or "")))
        return web.json_response(_shown(taken), status=201)

    async def _snapshots(self, request: web.Request, owner: Owner) -> web.Response:
        sandbox_id = request.query.get("sandboxID", "")
        found = sorted(self._sandboxes.tables.snapshots.all(owner.name), key=lambda one: one.created_at)
        return web.json_response([_shown(one) for one in found if sandbox_id in ("", one.sandbox_id)])

    async def delete_snapshot(self, request: web.Request, owner: Owner) -> web.Response:
        """Delete the snapshot that the path names as a template. Raises ApiError 404."""
        name = request.match_info["id"]
        found = self._sandboxes.tables.snapshots.get(owner.name, name)
        if found is None:
            raise not_found(name)
        self._sandboxes.tables.snapshots.drop(owner.name, name)
        if isinstance(self._sandboxes.backend, LocalProvider):
            # An image that sandboxes use is deleted when they end.
            await self._sandboxes.backend.drop_image(ImageRef(found.image))
        return web.Response(status=204)


async def _refuse(request: web.Request, owner: Owner) -> web.StreamResponse:
    raise unsupported(f"{request.method} {request.path}")


def _shown(snapshot: SandboxSnapshot) -> dict[str, Any]:
    return {"snapshotID": snapshot.id, "names": [snapshot.name] if snapshot.name else []}


async def sample(live: LiveSandbox) -> dict[str, Any]:
    """Return the current usage; the CPU share is an average since the previous sample. Raises SandboxGone."""
    usage = await live.handle.usage()
    now = time.time()
    before = live.cpu or CpuSample(at=live.row.started_at, cpu_s=0.0)
    live.cpu = CpuSample(at=now, cpu_s=usage.cpu_s)
    share = 100 * max(0.0, usage.cpu_s - before.cpu_s) / max(1e-3, now - before.at)
    return {
        "timestamp": timestamp(now),
        "timestampUnix": int(now),
        "cpuCount": max(1, round(usage.cpus or 1)),
        "cpuUsedPct": round(share, 2),
        "memUsed": usage.memory_bytes,
        "memTotal": usage.memory_limit_bytes or 0,
        "memCache": 0,
        "diskUsed": usage.disk_bytes,
        "diskTotal": usage.disk_limit_bytes or 0,
    }


async def take_snapshot(sandboxes: Sandboxes, live: LiveSandbox, name: str) -> SandboxSnapshot:
    """Make an image of the sandbox's files. The sandbox is restarted from that image, without its processes, so the
    request is refused if commands are running. Raises ApiError 409, SandboxError."""
    async with live.changing:
        row = live.row
        if row.state is not State.RUNNING:
            raise ApiError(409, f"sandbox {row.id!r} is paused: resume it first")
        if running := live.processes.running():
            raise ApiError(409, f"{len(running)} commands are running, which a snapshot would end: end them first")
        image = await live.handle.snapshot()
        snapshot = SandboxSnapshot(
            id=f"s{secrets.token_hex(10)}",
            owner=row.owner,
            image=image,
            name=name,
            sandbox_id=row.id,
            created_at=time.time(),
        )
        sandboxes.tables.snapshots.put(snapshot)
        rest_s = max(1.0, row.end_at - time.time())
        row = replace(row, image=image, boot_key=f"{row.id}-{secrets.token_hex(4)}", timeout_s=rest_s)
        try:
            ref = await sandboxes.backend.create(spec_of(row))
            live.continue_as(await sandboxes.backend.attach(ref))
        except SandboxError:
            sandboxes.forget(live)
            raise
        sandboxes.update(live, replace(row, ref=ref))
        return snapshot
