"""Connections of a gateway's listener: deadlines for heads and answers, refusals in the form of the API.

Invariants:
- A request's head is complete within `header_timeout_s`, counted from the connection's start for the first request and
  from the head's first byte for a later one. Between requests, a connection stays open like any of aiohttp's. A head
  that is sent together with the end of an earlier request (pipelined) is counted from the next bytes on.
- Bytes that the kernel does not take within `send_timeout_s`, because the client does not read, end the connection; who
  waits until they are sent gets a ConnectionError. A connection buffers nothing beside these bytes.
- What aiohttp's parser refuses is answered as JSON in the form of the API that the path names, OpenAI's if there is
  none, and logged in a line.
- After a refusal, at most a bounded number of the request's remaining bytes is read, and dropped, so that the client
  reads the answer instead of a reset connection.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import ERROR

from headrace.serve.gateway.dialects.anthropic import AnthropicMessages
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.dialects.dialect import Dialect
from headrace.serve.gateway.dialects.responses import Responses
from headrace.serve.gateway.errors import BadRequest, GatewayBroken, RequestTimeout, WireError
from headrace.serve.gateway.http.delivery import json_response

READ_BYTES = 2**16
"""Read buffer of a connection. aiohttp stops reading at twice its size."""
STRANGER_BYTES = 2**20
"""Most bytes that are read and dropped of a body that nobody asked for."""
LINGER_S = 2.0
CLIENT_LINGER_S = 10.0
"""Longest time for which the rest of a refused body is read and dropped: of a stranger's, and of another client's."""

_HEAD_START_BYTES = 1024
_REASON_CHARACTERS = 300
_RESET = struct.pack("ii", 1, 0)
_PATH = re.compile(rb"\s*[A-Za-z]+ +([!-~]+)")
_DEFECT = "Internal error of the gateway; see its log."
_DIALECTS: dict[str, Dialect] = {"/v1/messages": AnthropicMessages(), "/v1/responses": Responses()}
_CHAT = ChatCompletions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Deadlines of a connection; `refused` is told of the path and the reason of what the parser refused, and of the
    exception if it is a defect."""

    header_timeout_s: float
    send_timeout_s: float
    refused: Callable[[str, str, BaseException | None], None]


class Connection(web.RequestHandler):
    """Connection of one client."""

    __slots__ = ("_body", "_head", "_head_begun", "_head_timer", "_is_refused", "_send_timer", "_settings", "_wire")

    def __init__(self, server: web.Server, settings: ConnectionSettings, loop: asyncio.AbstractEventLoop) -> None:
        # `dismiss` lingers instead.
        super().__init__(server, loop=loop, access_log=None, lingering_time=0.0, read_bufsize=READ_BYTES)  # type: ignore[arg-type]
        self._settings = settings
        self._wire: asyncio.Transport | None = None
        self._body: StreamReader | None = None
        self._head = b""
        self._head_begun = self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asyncio's class in uvloop.
        self._wire = cast("asyncio.Transport", transport)
        # Bytes that the kernel does not take pause the writer at once, and not only from 64 KiB on.
        self._wire.set_write_buffer_limits(high=0)
        # The kernel takes many pings before it is full. It ends the connection if nobody reads them from it.
        timeout_ms = math.ceil(self._settings.send_timeout_s * 1000)
        self._wire.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        self._await_head()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        # The body's reader refers to the connection: a cycle, which lasts until the next full collection.
        self._body = self._head_timer = self._send_timer = None
        if exc is None and self.writing_paused:
            exc = ConnectionResetError("the client did not read its answer")
        super().connection_lost(exc)
        self._wire = None

    def data_received(self, data: bytes) -> None:
        before, is_head = self._request_count, self._body is None or self._body.is_eof()
        if is_head and data:
            self._note_head(data)
        super().data_received(data)
        if self._request_count > before:
            self._head_ended()
        elif is_head and self._head_timer is None and data.strip(b"\r\n"):
            self._await_head()

    def _note_head(self, data: bytes) -> None:
        if self._is_refused:
            # What follows a refused head is no head; the refusal may not have been written yet.
            return
        if not self._head_begun:
            self._head = b""
        self._head_begun = True
        self._head += data[: _HEAD_START_BYTES - len(self._head)]

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._settings.header_timeout_s, self._head_overdue)

    def _head_ended(self) -> None:
        self._head_begun = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._is_refused = bool(self._messages) and not isinstance(self._messages[-1][0], RawRequestMessage)
        body, self._body = self._body, self._messages[-1][1] if self._messages else None
        if body is not None and not body.is_eof() and body is not self._body:
            # aiohttp leaves a body open whose chunks its parser refuses.
            body.set_exception(web.RequestPayloadError("its chunks are not valid"))

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self._waiter is None:
            # It is behind a request that is being answered.
            self.close()
            return
        if self._head_begun and self._wire is not None:
            failure = RequestTimeout(f"The request's head did not arrive within {self._settings.header_timeout_s} s.")
            self._wire.write(_whole_response(dialect_of(self._path()), failure))
        self.force_close()

    def _path(self) -> str:
        found = _PATH.match(self._head)
        return found[1].decode() if found else ""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self._loop.call_later(self._settings.send_timeout_s, self._reset)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _reset(self) -> None:
        if self._wire is not None:
            # The kernel drops what it has of the answer too.
            self._wire.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._wire.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a request that the parser refused, or whose handler failed."""
        is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        path = request.path if is_ours else self._path()
        # May quote the request.
        reason = " ".join((message or _DEFECT).encode("utf-8", "replace").decode().split())[:_REASON_CHARACTERS]
        self._settings.refused(path, reason, exc if is_ours else None)
        if request.writer.output_size > 0:
            raise ConnectionError("part of another response has been sent")
        failure = GatewayBroken(_DEFECT) if is_ours else BadRequest(f"This is not a valid request: {reason}")
        dialect = dialect_of(path)
        response = json_response(dialect.error(failure), dialect.status(failure))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        self._settings.refused(self._path(), str(args[0]), error if isinstance(error, BaseException) else None)


async def listen(runner: web.AppRunner, host: str, port: int, settings: ConnectionSettings) -> asyncio.Server:
    """Serve the application of a runner that is set up. Close the server before the runner's cleanup."""
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    make_request = server.request_factory

    def request_of(message: Any, *parts: Any) -> web.BaseRequest:
        # In place of what it cannot parse, aiohttp makes a request of HTTP/1.0 up.
        return make_request(message._replace(version=HttpVersion11) if message is ERROR else message, *parts)

    server.request_factory = request_of
    return await loop.create_server(lambda: Connection(server, settings, loop), host, port, backlog=4096)


async def dismiss(
    request: web.Request,
    response: web.StreamResponse,
    *,
    most_bytes: int = STRANGER_BYTES,
    linger_s: float = LINGER_S,
) -> None:
    """Send a response, and end the connection after it, if the request's body has not been read."""
    if request.content.is_eof() or response.prepared:
        return
    response.force_close()
    with suppress(TimeoutError, ConnectionError, web.RequestPayloadError):
        await response.prepare(request)
        await response.write_eof()
        async with asyncio.timeout(linger_s):
            while most_bytes > 0 and (piece := await request.content.readany()):
                most_bytes -= len(piece)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of the API that a path belongs to, OpenAI's Chat Completions if it belongs to none."""
    return next((dialect for route, dialect in _DIALECTS.items() if route in path), _CHAT)


def _whole_response(dialect: Dialect, failure: WireError) -> bytes:
    """Return a response as it stands on the wire, after which the connection ends."""
    status, body = HTTPStatus(dialect.status(failure)), orjson.dumps(dialect.error(failure))
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
