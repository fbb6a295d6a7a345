"""Control-plane routes for the life cycle of sandboxes, in both generations of the API."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from headrace.serve.sandbox_servers.e2b.envd import Authentication
from headrace.serve.sandbox_servers.e2b_state.bodies import (
    Connect,
    NewSandbox,
    Pause,
    Refresh,
    Timeout,
    idempotency_key,
    read_body,
    timestamp,
    without_network,
)
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, unsupported
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.e2b_state.lifecycle import Sandboxes
from headrace.serve.sandbox_servers.e2b_state.limits import SandboxLimits
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import LiveSandbox
from headrace.serve.sandbox_servers.e2b_state.table import SandboxRow, State

R = TypeVar("R")

_TIMEOUT_S: Final = {"/sandboxes": 15, "/v2/sandboxes": 300}
"""Default timeout of a created sandbox in seconds, by route, from the specifications of the two generations."""
_RESUME_TIMEOUT_S: Final = 15
_CONNECT_TIMEOUT_S: Final = 300


ENVD_VERSION: Final = "0.6.4"
"""Version of envd that is reported to the SDKs; the default user, closing of stdin, octet-stream uploads and entries in
watch events depend on it."""
_CLIENT_ID: Final = "headrace"


MAX_LIMIT: Final = 100
SHOWN: Final = frozenset({State.RUNNING, State.PAUSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Parameters of a list request. `after` is the (started_at, id) of the last row on the previous page."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    states: frozenset[State] = SHOWN
    template: str = ""
    started_after: float = 0.0
    limit: int = MAX_LIMIT
    ascending: bool = False
    after: tuple[float, str] | None = None


def parse_query(parameters: Mapping[str, str]) -> Query:
    """Parse the parameters of a list request. Raises ApiError 400."""
    order = parameters.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: {order[:20]!r} is neither asc nor desc")
    try:
        metadata = parameters.get("metadata", "")
        pairs = parse_qsl(metadata, keep_blank_values=True, strict_parsing=bool(metadata))
    except ValueError as error:
        raise ApiError(400, f"metadata: {error}") from error
    states = [name for name in parameters.get("state", "").split(",") if name]
    if wrong := [name for name in states if name not in {state.value for state in SHOWN}]:
        raise ApiError(400, f"state: {wrong[0][:20]!r} is neither running nor paused")
    started_after = parameters.get("startedAfter", "")
    try:
        started_after_s = datetime.fromisoformat(started_after).timestamp() if started_after else 0.0
    except ValueError as error:
        raise ApiError(400, f"startedAfter: {started_after[:40]!r} is not a time") from error
    limit = parameters.get("limit", "") or str(MAX_LIMIT)
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
        raise ApiError(400, f"limit: {limit[:20]!r} is not a number from 1 to {MAX_LIMIT}")
    return Query(
        # The SDKs quote names and values once more.
        metadata={unquote(key): unquote(value) for key, value in pairs},
        states=frozenset(State(name) for name in states) or SHOWN,
        template=parameters.get("template", ""),
        started_after=started_after_s,
        limit=int(limit),
        ascending=order == "asc",
        after=_token(parameters.get("nextToken", "")),
    )


def _token(text: str) -> tuple[float, str] | None:
    if not text:
        return None
    try:
        started, _, sandbox_id = base64.urlsafe_b64decode(text.encode()).decode().partition("_")
        return float.fromhex(started), sandbox_id
    except (ValueError, binascii.Error, OverflowError) as error:
        raise ApiError(400, "nextToken: not a token of this server") from error


def page(rows: Iterable[SandboxRow], query: Query) -> tuple[list[SandboxRow], str]:
    """Return the rows of a page and the token for the next page, which is "" on the last page."""

    def wanted(row: SandboxRow) -> bool:
        return (
            row.state in query.states
            and (not query.template or row.template == query.template)
            and row.started_at >= query.started_after
            and query.metadata.items() <= row.metadata.items()
        )

    found = sorted(filter(wanted, rows), key=_place, reverse=not query.ascending)
    if query.after is not None:
        after = query.after
        found = [row for row in found if (_place(row) > after if query.ascending else _place(row) < after)]
    here = found[: query.limit]
    return here, encode_token(here[-1]) if len(found) > query.limit else ""


def encode_token(row: SandboxRow) -> str:
    return base64.urlsafe_b64encode(f"{row.started_at.hex()}_{row.id}".encode()).decode()


def _place(row: SandboxRow) -> tuple[float, str]:
    return row.started_at, row.id


def created(row: SandboxRow, domain: str) -> dict[str, Any]:
    """Return the response to create, connect and resume, with the access token."""
    return {
        "templateID": row.template,
        "sandboxID": row.id,
        "clientID": _CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": row.access_token,
        "trafficAccessToken": row.traffic_token if row.secure else None,
        "domain": domain,
    }


def listed(row: SandboxRow, defaults: SandboxLimits) -> dict[str, Any]:
    """Return a row for a list response. Sizes are those of the sandbox's limits, and 0 where it has none; without a
    limit of its own, a sandbox may use all processors."""
    own = SandboxLimits(memory_bytes=row.memory_bytes, disk_bytes=row.disk_bytes)
    limits = defaults.lowered_by(own)
    return {
        "templateID": row.template,
        "sandboxID": row.id,
        "clientID": _CLIENT_ID,
        "startedAt": timestamp(row.started_at),
        "endAt": timestamp(row.end_at),
        "cpuCount": row.cpus or os.cpu_count() or 1,
        "memoryMB": (limits.memory_bytes or 0) >> 20,
        "diskSizeMB": (limits.disk_bytes or 0) >> 20,
        "state": row.state.value,
        "envdVersion": ENVD_VERSION,
        "metadata": row.metadata,
    }


class ControlPlane:
    """Handlers for the routes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    def routes(self, access: Authentication) -> list[web.RouteDef]:
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
        wanted = order.network.model_copy(update={"allow_internet_access": order.allow_internet_access})
        headers = without_network(request, wanted)
        row = await self._sandboxes.create(owner, order, key, _TIMEOUT_S[request.path])
        return web.json_response(created(row, self._sandboxes.domain), status=201, headers=headers)

    async def _list_running(self, request: web.Request, owner: Owner) -> web.Response:
        await self._sandboxes.forget_lost()
        query = parse_query({"metadata": request.query.get("metadata", ""), "state": "running"})
        everything = replace(query, limit=max(1, len(self._sandboxes.rows(owner))))
        rows, _ = page(self._sandboxes.rows(owner), everything)
        return web.json_response([listed(row, self._sandboxes.defaults) for row in rows])

    async def _list(self, request: web.Request, owner: Owner) -> web.Response:
        query = parse_query(request.query)
        await self._sandboxes.forget_lost()
        rows, token = page(self._sandboxes.rows(owner), query)
        headers = {"x-next-token": token} if token else {}
        return web.json_response([listed(row, self._sandboxes.defaults) for row in rows], headers=headers)

    async def _get(self, request: web.Request, live: LiveSandbox) -> web.Response:
        row = live.row
        lifecycle = {"autoResume": row.auto_resume, "onTimeout": "pause" if row.pause_at_end else "kill"}
        more = {"envdAccessToken": row.access_token, "domain": self._sandboxes.domain, "lifecycle": lifecycle}
        return web.json_response({**listed(row, self._sandboxes.defaults), **more})

    async def _delete(self, request: web.Request, live: LiveSandbox) -> web.Response:
        await self._sandboxes.kill(live)
        return web.Response(status=204)

    async def _connect(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Connect)
        timeout_s = live.time_to_keep(body.timeout, _CONNECT_TIMEOUT_S)
        resumed = await self._finish(self._sandboxes.resume(live, timeout_s))
        if not resumed:
            await self._finish(self._sandboxes.set_timeout(live, timeout_s, only_longer=True))
        return web.json_response(created(live.row, self._sandboxes.domain), status=201 if resumed else 200)

    async def _set_timeout(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Timeout)
        await self._finish(self._sandboxes.set_timeout(live, live.time_to_keep(body.timeout, 0)))
        return web.Response(status=204)

    async def _refresh(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Refresh)
        timeout_s = live.time_to_keep(body.duration, 0)
        await self._finish(self._sandboxes.set_timeout(live, timeout_s, only_longer=True))
        return web.Response(status=204)

    async def _pause(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Pause)
        if body.memory is False:
            raise unsupported("a pause that drops the memory")
        await self._finish(self._sandboxes.pause(live))
        return web.Response(status=204)

    async def _resume(self, request: web.Request, live: LiveSandbox) -> web.Response:
        body = await read_body(request, Connect)
        timeout_s = live.time_to_keep(body.timeout, _RESUME_TIMEOUT_S)
        if not await self._finish(self._sandboxes.resume(live, timeout_s)):
            raise ApiError(409, f"sandbox {live.row.id!r} is already running")
        return web.json_response(created(live.row, self._sandboxes.domain), status=201)

    async def _finish(self, change: Coroutine[Any, Any, R]) -> R:
        """Complete a change that has been started, even if the client disconnects."""
        return await asyncio.shield(self._sandboxes.tasks.share(change))
