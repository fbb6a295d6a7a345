"""A real HTTP proxy in front of a server, which answers some calls of a path with 500 without passing them on, and
those of other paths late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from support.loopback import on_loopback

REFUSAL = {"error": {"message": "the engine does not wake up"}}


@dataclass(frozen=True)
class Call:
    """An answered call: the time on the monotonic clock, the path, and the status of the answer."""

    at_s: float
    path: str
    status: int


@dataclass
class RefusingProxy:
    """`refusing` has the number of calls of a path that are still to be answered with 500, `late_s` the seconds by
    which the calls of a path are delayed on their way to the server."""

    target: str
    http: aiohttp.ClientSession
    url: str = ""
    refusing: dict[str, float] = field(default_factory=dict)
    late_s: dict[str, float] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def of(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]

    async def answer(self, request: web.Request) -> web.Response:
        began_s = time.monotonic()
        if self.refusing.get(request.path, 0) > 0:
            self.refusing[request.path] -= 1
            self.calls.append(Call(began_s, request.path, 500))
            return web.json_response(REFUSAL, status=500)
        await asyncio.sleep(self.late_s.get(request.path, 0.0))
        url = self.target + request.path_qs
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with self.http.request(request.method, url, data=await request.read(), headers=headers) as response:
            body = await response.read()
        self.calls.append(Call(began_s, request.path, response.status))
        return web.Response(body=body, status=response.status, content_type=response.content_type)


@asynccontextmanager
async def refusing_proxy(target: str) -> AsyncIterator[RefusingProxy]:
    """Serve a proxy of the server at `target` on a loopback port during the block."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        proxy = RefusingProxy(target, http)
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", proxy.answer)
        async with on_loopback(app) as proxy.url:
            yield proxy
