"""From an answer to bytes on the agent's connection.

Invariants:
- A turn is held whole: no byte of its content leaves before it is sampled to its end, so an engine failure is always
  before content. Meanwhile a stream gets a ping at least every `ping_s`.
- Until the first ping is due not even the status has left: what fails early fails with the wire's own status.
- A stream ends with the wire's terminator or with its error event: never with a clean end that an agent could take for
  an answer.
- An answer counts as delivered when its last byte was handed to the connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from headrace.serve.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.serve.conversation import TurnAnswer
    from headrace.serve.dialects.dialect import Dialect, WireRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How one request is answered. `delivered` is called with the answer once its last byte has left; `failed` with a
    failure before its first byte does."""

    dialect: Dialect
    asked: WireRequest
    ping_s: float
    created_s: int
    delivered: Callable[[TurnAnswer], None]
    failed: Callable[[WireError], None]

    async def run(self, request: web.Request, work: Awaitable[TurnAnswer]) -> web.StreamResponse:
        """Answer with what `work` gives. Raises what it raises where nothing was sent yet."""
        return await (self._stream(request, work) if self.asked.stream else self._whole(request, work))

    async def _whole(self, request: web.Request, work: Awaitable[TurnAnswer]) -> web.StreamResponse:
        answer = await work
        document = self.dialect.answer(self.asked, answer, created_s=self.created_s)
        response = json_response(document)
        await response.prepare(request)
        await response.write_eof()
        self.delivered(answer)
        return response

    async def _stream(self, request: web.Request, work: Awaitable[TurnAnswer]) -> web.StreamResponse:
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        try:
            answer = await self._hold(request, response, work)
        except WireError as failure:
            if not response.prepared and not self.dialect.refuses_in_stream(failure):
                raise
            return await self._break(request, response, failure)
        stream = self.dialect.stream(self.asked, answer, created_s=self.created_s)
        if response.prepared:
            await response.write(stream)
        else:
            # Head and events in one write.
            response = web.Response(body=stream, headers=_STREAM_HEADERS)
            await response.prepare(request)
        await response.write_eof()
        self.delivered(answer)
        return response

    async def _hold(
        self, request: web.Request, response: web.StreamResponse, work: Awaitable[TurnAnswer]
    ) -> TurnAnswer:
        """Wait for the answer, with pings."""
        async with _own_task(work) as task:
            while not (await asyncio.wait({task}, timeout=self.ping_s))[0]:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(self.dialect.ping)
            return await task

    async def _break(
        self, request: web.Request, response: web.StreamResponse, failure: WireError
    ) -> web.StreamResponse:
        """Say what failed in the stream. It ends in order: agents take a cut after the error event for another fault,
        and ask again."""
        self.failed(failure)
        if not response.prepared:
            await response.prepare(request)
        await response.write(self.dialect.stream_error(self.asked, failure))
        await response.write_eof()
        return response


_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class _own_task:
    """`async with _own_task(work) as task`: the work as a task that does not outlive the block."""

    def __init__(self, work: Awaitable[TurnAnswer]) -> None:
        self._task = asyncio.ensure_future(work)

    async def __aenter__(self) -> asyncio.Future[TurnAnswer]:
        return self._task

    async def __aexit__(self, *exc: object) -> None:
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._task.cancelled():
            # Seen also where the block was left for another reason.
            self._task.exception()


def json_response(document: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
