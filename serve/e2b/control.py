"""Routes of the control plane for the life of sandboxes, in both generations of the API."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiohttp import web

from headrace.serve.e2b.listing import page, parse_query
from headrace.serve.e2b_sandboxes.bodies import (
    Connect,
    NewSandbox,
    Pause,
    Refresh,
    Timeout,
    idempotency_key,
    read_body,
    timestamp,
)
from headrace.serve.e2b_sandboxes.errors import ApiError, unsupported

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from headrace.serve.e2b.access import Access
    from headrace.serve.e2b_sandboxes.keys import Owner
    from headrace.serve.e2b_sandboxes.lifecycle import Sandboxes
    from headrace.serve.e2b_sandboxes.live_sandbox import LiveSandbox
    from headrace.serve.e2b_sandboxes.table import Row

R = TypeVar("R")

_TIMEOUT_S: Final = {"/sandboxes": 15, "/v2/sandboxes": 300}
"""Default timeout of a create, by route, from the specifications of the two generations."""
_RESUME_TIMEOUT_S: Final = 15
_CONNECT_TIMEOUT_S: Final = 300


ENVD_VERSION: Final = "0.6.4"
"""Version of envd for the SDKs, on which the default user, closing of stdin, octet-stream uploads, and entries in watch
events depend."""
_CLIENT_ID: Final = "headrace"


def created(row: Row) -> dict[str, Any]:
    """Return the response to create, connect and resume, with the access token."""
    return {
        "templateID": row.template,
        "sandboxID": row.id,
        "clientID": _CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": row.access_token,
        "domain": None,
    }


def listed(row: Row) -> dict[str, Any]:
    """Return a row of a list. The sizes are 0, because the provider's own limits apply."""
    return {
        "templateID": row.template,
        "sandboxID": row.id,
        "clientID": _CLIENT_ID,
        "startedAt": timestamp(row.started_at),
        "endAt": timestamp(row.end_at),
        "cpuCount": 0,
        "memoryMB": 0,
        "diskSizeMB": 0,
        "state": row.state.value,
        "envdVersion": ENVD_VERSION,
        "metadata": row.metadata,
    }


def detail(row: Row) -> dict[str, Any]:
    """Return one sandbox with its lifecycle and access token."""
    lifecycle = {"autoResume": False, "onTimeout": "pause" if row.pause_at_end else "kill"}
    return {**listed(row), "envdAccessToken": row.access_token, "domain": None, "lifecycle": lifecycle}


class ControlPlane:
    """Handlers of the routes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    def routes(self, access: Access) -> list[web.RouteDef]:
        one, owned, on = "/sandboxes/{id}", access.owned, access.on_sandbox
        return [
            web.post("/sandboxes", owned(self._create)),
            web.post("/v2/sandboxes", owned(self._create)),
            web.get("/sandboxes", owned(self._list_running)),
            web.get("/v2/sandboxes", owned(self._list)),
            web.get(one, on(self._get)),
            web.delete(one, on(self._delete)),
            web.post(f"{one}/connect", on(self._connect)),
            web.post(f"/v2{one}/connect", on(self._connect)),
            web.post(f"{one}/timeout", on(self._set_timeout)),
            web.post(f"{one}/refreshes", on(self._refresh)),
            web.post(f"{one}/pause", on(self._pause)),
            web.post(f"{one}/resume", on(self._resume)),
        ]

    async def _create(self, request: web.Request, owner: Owner) -> web.Response:
        order = await read_body(request, NewSandbox)
        key = idempotency_key(request)
        for name, value in (("volumeMounts", order.volume_mounts), ("mcp", order.mcp), ("iam", order.iam)):
            if value:
                raise unsupported(name)
        row = await self._sandboxes.create(owner, order, key, _TIMEOUT_S[request.path])
        return web.json_response(created(row), status=201)

    async def _list_running(self, request: web.Request, owner: Owner) -> web.Response:
        await self._sandboxes.forget_lost()
        query = parse_query({"metadata": request.query.get("metadata", ""), "state": "running"})
        everything = replace(query, limit=max(1, len(self._sandboxes.rows(owner))))
        rows, _ = page(self._sandboxes.rows(owner), everything)
        return web.json_response([listed(row) for row in rows])

    async def _list(self, request: web.Request, owner: Owner) -> web.Response:
        query = parse_query(request.query)
        await self._sandboxes.forget_lost()
        rows, token = page(self._sandboxes.rows(owner), query)
        headers = {"x-next-token": token} if token else {}
        return web.json_response([listed(row) for row in rows], headers=headers)

    async def _get(self, request: web.Request, live: LiveSandbox) -> web.Response:
        return web.json_response(detail(live.row))

    async def _delete(self, request: web.Request, live: LiveSandbox) -> web.Response:
        await self._sandboxes.kill(live)
        return web.Response(status=204)

    async def _connect(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Connect)
        timeout_s = float(_CONNECT_TIMEOUT_S if body.timeout is None else body.timeout)
        resumed = await self._finish(self._sandboxes.resume(live, timeout_s))
        if not resumed:
            await self._finish(self._sandboxes.set_timeout(live, timeout_s, only_longer=True))
        return web.json_response(created(live.row), status=201 if resumed else 200)

    async def _set_timeout(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Timeout)
        await self._finish(self._sandboxes.set_timeout(live, float(body.timeout)))
        return web.Response(status=204)

    async def _refresh(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Refresh)
        await self._finish(self._sandboxes.set_timeout(live, float(body.duration), only_longer=True))
        return web.Response(status=204)

    async def _pause(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Pause)
        if body.memory is False:
            raise unsupported("a pause that drops the memory")
        await self._finish(self._sandboxes.pause(live))
        return web.Response(status=204)

    async def _resume(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Connect)
        timeout_s = float(_RESUME_TIMEOUT_S if body.timeout is None else body.timeout)
        if not await self._finish(self._sandboxes.resume(live, timeout_s)):
            raise ApiError(409, f"sandbox {live.row.id!r} is already running")
        return web.json_response(created(live.row), status=201)

    async def _finish(self, change: Coroutine[Any, Any, R]) -> R:
        """Complete a change that was started, even if the client disconnects."""
        return await asyncio.shield(self._sandboxes.tasks.share(change))
