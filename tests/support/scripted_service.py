"""A server whose answers a test writes down, for clients of services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class ScriptedService:
    """Server that takes an answer of `script` for each request, the last one for ever, and records the requests."""

    def __init__(self, *script: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self.script = list(script)
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.open = self.most_open = 0
        self.url = ""

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve for the block, and yield the base URL."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield self.url

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json() if request.can_read_body else request.path)
        self.headers.append(dict(request.headers))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            return await answer(request)
        finally:
            self.open -= 1


def json(document: Any, status: int = 200, **headers: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answer with a document. Underscores in the names of headers stand for dashes."""

    async def answer(_: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(document, status=status, headers=named)

    return answer


def text(body: str, status: int = 200) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=status)

    return answer


async def cut_off(request: web.Request) -> web.StreamResponse:
    """Close the connection in the middle of the body."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"result": [[')
    assert request.transport is not None
    request.transport.close()
    return response


async def silent(_: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


def passages(*contents: str) -> Any:
    """A retriever's answer for one query, without scores."""
    return {"result": [[{"contents": text} for text in contents]]}


def completion(content: str | None, **more: Any) -> Any:
    return {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}], **more}
