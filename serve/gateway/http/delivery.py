"""Delivery of answers on the agents' connections, either in one piece or as a stream with pings.

Invariants:
- A turn is buffered: no content is sent before the turn has been fully sampled, so that an engine failure can only
  occur before any content is sent. Meanwhile a stream gets a ping at least every `ping_s`.
- Nothing, not even the status, is sent before the first ping is due, so that an early failure gets the dialect's own
  status.
- A stream ends with the dialect's terminator or with its error event, never with a clean end that an agent could take
  for an answer.
- An answer counts as delivered once its last byte has been passed to the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import orjson
from aiohttp import web

from headrace.serve.gateway.conversation import TurnAnswer
from headrace.serve.gateway.dialects.dialect import Dialect, WireRequest
from headrace.serve.gateway.errors import WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Delivery of the answers to one request. `delivered` is called with each once the last byte has been sent;
    `failed` is called with a failure before the failure's first byte is sent."""

    dialect: Dialect
    asked: WireRequest
    ping_s: float
    created_s: int
    delivered: Callable[[TurnAnswer], None]
    failed: Callable[[WireError], None]

    async def run(self, request: web.Request, work: Awaitable[Sequence[TurnAnswer]]) -> web.StreamResponse:
        """Send the answers that `work` returns. Re-raise an error of `work` if nothing has been sent yet."""
        if not self.asked.stream:
            first, *others = answers = await work
            whole = json_response(self.dialect.answer(self.asked, first, created_s=self.created_s, others=others))
            await whole.prepare(request)
            await whole.write_eof()
            self._sent(answers)
            return whole
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        try:
            async with _own_task(work) as task:
                while not (await asyncio.wait({task}, timeout=self.ping_s))[0]:
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(self.dialect.ping)
                first, *others = answers = await task
        except WireError as failure:
            if not response.prepared and not self.dialect.refuses_in_stream(failure):
                raise
            self.failed(failure)
            if not response.prepared:
                await response.prepare(request)
            await response.write(self.dialect.stream_error(self.asked, failure))
            # The stream ends in order: agents take a cut after the error event for another fault, and retry.
            await response.write_eof()
            return response
        stream = self.dialect.stream(self.asked, first, created_s=self.created_s, others=others)
        if response.prepared:
            await response.write(stream)
        else:
            # Sends head and events in one write.
            response = web.Response(body=stream, headers=_STREAM_HEADERS)
            await response.prepare(request)
        await response.write_eof()
        self._sent(answers)
        return response

    def _sent(self, answers: Sequence[TurnAnswer]) -> None:
        for answer in answers:
            self.delivered(answer)


_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class _own_task:
    """Context manager that runs `work` as a task that does not outlive the block."""

    def __init__(self, work: Awaitable[Sequence[TurnAnswer]]) -> None:
        self._task = asyncio.ensure_future(work)

    async def __aenter__(self) -> asyncio.Future[Sequence[TurnAnswer]]:
        return self._task

    async def __aexit__(self, *exc: object) -> None:
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._task.cancelled():
            # Marks the exception as retrieved when the block was left for another reason.
            self._task.exception()


def json_response(document: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
