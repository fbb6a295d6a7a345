"""The address of a gateway in several processes: it places sessions, and passes requests on to the process that has
their session.

Invariants:
- The id of a session says which process has it, and so does its token. The front keeps no table.
- The URL that opening a session returns is that of its process: agents that use it pass no relay.
- A request waits for a process that is being restarted, up to `WAIT_S`, and is sent once at most.
- What cannot be placed goes to the first process, which refuses it in the form of the API.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import aiohttp
import orjson
from aiohttp import web
from yarl import URL

from headrace.sandboxes.host.http_relay import ask, forwarded, stream_back
from headrace.serve.gateway.errors import WireError
from headrace.serve.gateway.http.admin_routes import refusal_of
from headrace.serve.gateway.http.agent_routes import bearer_of, token_of
from headrace.serve.gateway.http.bodies import read_body
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.delivery import json_response
from headrace.serve.gateway.http.placement import place_of, place_of_token

if TYPE_CHECKING:
    from headrace.serve.gateway.processes.member import Member

WAIT_S: Final = 120.0
"""Longer than a process may take to end between two turns."""
DEFAULTS: Final = GatewayConfig()
_ASK_AGAIN_S: Final = 0.05


class Front:
    """Handlers of the front. `http` is the client with which requests are passed on."""

    def __init__(self, members: Sequence[Member], http: aiohttp.ClientSession, admin_token: str) -> None:
        self._members = members
        self._http = http
        self._admin_token = admin_token.encode()

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/", self._alive)
        app.router.add_get("/healthz", self._alive)
        app.router.add_post("/sessions", self._open)
        for suffix, method in (("/finish", "POST"), ("/export", "GET"), ("", "DELETE")):
            app.router.add_route(method, f"/sessions/{{session_id:.+}}{suffix}", self._of_session)
        app.router.add_route("*", "/s/{token}/{path:.*}", self._of_token)
        app.router.add_route("*", "/{path:.*}", self._of_token)
        return app

    async def _alive(self, _request: web.Request) -> web.StreamResponse:
        serving = sum(member.serving.is_set() for member in self._members)
        # One that is being replaced is back within seconds, and requests wait for it.
        document = {"status": "ok" if serving else "starting", "processes": len(self._members), "serving": serving}
        return json_response(document, 200 if serving else 503)

    async def _of_token(self, request: web.Request) -> web.StreamResponse:
        place = place_of_token(token_of(request))
        return await self._passed(request, 0 if place is None or place >= len(self._members) else place)

    async def _of_session(self, request: web.Request) -> web.StreamResponse:
        return await self._passed(request, self._place(request.match_info["session_id"]))

    def _place(self, session_id: str) -> int:
        return place_of(session_id, len(self._members))

    async def _open(self, request: web.Request) -> web.StreamResponse:
        key = bearer_of(request).encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(key, self._admin_token):
            return await self._passed(request, 0)
        body = await self._body(request) or b"{}"
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            return await self._asked(request, 0, body)
        if document.get("session_id") is None:
            document["session_id"] = f"session-{secrets.token_hex(8)}"
        return await self._asked(request, self._place(str(document["session_id"])), orjson.dumps(document))

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await read_body(request, DEFAULTS.max_body_bytes, timeout_s=DEFAULTS.body_timeout_s)
        except WireError as error:
            refused = web.HTTPRequestTimeout if error.status == 408 else web.HTTPBadRequest
            raise refused(body=refusal_of(str(error)), content_type="application/json") from None

    async def _asked(self, request: web.Request, place: int, body: bytes) -> web.Response:
        """Return the response of a process to an admin request with this body."""
        headers = {"Authorization": request.headers.get("Authorization", ""), "Content-Type": "application/json"}

        async def send(url: URL) -> aiohttp.ClientResponse:
            return await self._http.request(request.method, url, headers=headers, data=body, allow_redirects=False)

        async with await self._sent(place, request.raw_path, send) as found:
            return web.Response(status=found.status, body=await found.read(), content_type="application/json")

    async def _passed(self, request: web.Request, place: int) -> web.StreamResponse:
        """Pass a request on, and its response back, piece by piece."""
        headers = forwarded(request.headers)
        answer = await self._sent(place, request.raw_path, lambda url: ask(request, self._http, url, headers))
        return await stream_back(request, answer)

    async def _sent(
        self, place: int, path: str, send: Callable[[URL], Awaitable[aiohttp.ClientResponse]]
    ) -> aiohttp.ClientResponse:
        """Return the head of a process's response. Waits for one that is being restarted. Raises HTTPException."""
        member, until = self._members[place], asyncio.get_running_loop().time() + WAIT_S
        while True:
            try:
                async with asyncio.timeout_at(until):
                    await member.serving.wait()
                return await send(URL(member.url + path, encoded=True))
            except aiohttp.ClientConnectorError:
                # It has just ended: nothing was sent.
                await asyncio.sleep(_ASK_AGAIN_S)
            except TimeoutError:
                raise _unavailable("the process of this session is starting") from None
            except aiohttp.ClientError:
                raise _unavailable("the process of this session has ended") from None


def _unavailable(reason: str) -> web.HTTPException:
    body = refusal_of(f"{reason}; ask again.")
    return web.HTTPServiceUnavailable(body=body, content_type="application/json", headers={"Retry-After": "1"})
