"""Both sides of a protocol that multiplexes byte streams over one WebSocket, for `expose` across hosts.

A binary message is one kind byte, four bytes of stream number (big-endian) and its data. Invariants:
- Streams are opened by one side only, the server; numbers are never used twice.
- A side sends at most `WINDOW_BYTES` of a stream that the other has not acknowledged, so a slow stream does not delay
  the others, and no more than that is buffered for it.
- The end of one direction of a stream leaves the other open; an error ends both. The end of the WebSocket ends all
  streams.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import IntEnum
from typing import Final, Protocol

from aiohttp import WSMessage, WSMsgType

from headrace.sandboxes.remote.tasks import ServerTasks

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

WINDOW_BYTES: Final = 256 << 10
MAX_STREAMS: Final = 64
_PIECE_BYTES: Final = 1 << 15
MAX_MESSAGE_BYTES: Final = 1 << 17
_HEADER: Final = struct.Struct(">BI")
_COUNT: Final = struct.Struct(">I")

logger = logging.getLogger(__name__)


class _Kind(IntEnum):
    DATA = 0
    """The first message with a stream's number opens the stream, even if it is empty."""
    END = 1
    """No more data in this direction."""
    ABORT = 2
    ACKNOWLEDGE = 3
    """The data is the number of bytes that have been passed on."""


class WebSocket(Protocol):
    """Common methods of aiohttp's client and server WebSockets."""

    async def send_bytes(self, data: bytes) -> None: ...

    def __aiter__(self) -> AsyncIterator[WSMessage]: ...


class Tunnel:
    """One side of a tunnel. `connect` opens the local connection for streams that the other side opens."""

    def __init__(self, socket: WebSocket, connect: Connect | None = None) -> None:
        self._socket = socket
        self._connect = connect
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._tasks: ServerTasks | None = None

    async def run(self) -> None:
        """Transfer streams until the WebSocket ends."""
        async with ServerTasks() as self._tasks:
            async for message in self._socket:
                if message.type is not WSMsgType.BINARY or len(message.data) < _HEADER.size:
                    return
                kind, number = _HEADER.unpack_from(message.data)
                self._receive(kind, number, message.data[_HEADER.size :])

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Open a stream from this side; the callback of `asyncio.start_server`."""
        if self._tasks is None or len(self._streams) >= MAX_STREAMS:
            writer.transport.abort()
            return
        self._last += 1
        stream = self._streams[self._last] = _Stream(self._last)
        self._tasks.start(self._carry(stream, reader, writer))

    def _receive(self, kind: int, number: int, data: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None:
            # Messages of streams that have ended meanwhile are ignored.
            if self._connect is None or self._tasks is None or kind != _Kind.DATA or number <= self._last:
                return
            self._last = number
            stream = self._streams[number] = _Stream(number)
            self._tasks.start(self._carry_opened(stream, self._connect))
        match kind:
            case _Kind.DATA:
                stream.arrived.put_nowait(data)
                stream.waiting_bytes += len(data)
                if stream.waiting_bytes > WINDOW_BYTES:
                    stream.abort()
            case _Kind.END:
                stream.arrived.put_nowait(None)
            case _Kind.ACKNOWLEDGE if len(data) == _COUNT.size:
                stream.acknowledge(_COUNT.unpack(data)[0])
            case _:
                stream.abort()

    async def _carry_opened(self, stream: _Stream, connect: Connect) -> None:
        try:
            if len(self._streams) > MAX_STREAMS:
                raise ConnectionError("too many streams")
            reader, writer = await connect()
        except OSError:
            self._streams.pop(stream.number, None)
            await self._send(_Kind.ABORT, stream.number)
            return
        await self._carry(stream, reader, writer)

    async def _carry(self, stream: _Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream.carrying = asyncio.current_task()
        try:
            if not stream.aborted:
                await self._send(_Kind.DATA, stream.number)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send_all(stream, reader))
                    group.create_task(self._pass_on(stream, writer))
                writer.close()
        except* (OSError, RuntimeError):
            # Abort the other side as well. (A closed WebSocket raises an error of these kinds, too.)
            stream.aborted = True
            try:
                await self._send(_Kind.ABORT, stream.number)
            except (OSError, RuntimeError) as error:
                logger.debug("stream %d: %s", stream.number, error)
        finally:
            self._streams.pop(stream.number, None)
            writer.transport.abort() if stream.aborted else writer.close()

    async def _send_all(self, stream: _Stream, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_PIECE_BYTES):
            await stream.room()
            stream.unacknowledged_bytes += len(data)
            await self._send(_Kind.DATA, stream.number, data)
        await self._send(_Kind.END, stream.number)

    async def _pass_on(self, stream: _Stream, writer: asyncio.StreamWriter) -> None:
        while (data := await stream.arrived.get()) is not None:
            writer.write(data)
            await writer.drain()
            stream.waiting_bytes -= len(data)
            if data:
                await self._send(_Kind.ACKNOWLEDGE, stream.number, _COUNT.pack(len(data)))
        writer.write_eof()

    async def _send(self, kind: _Kind, number: int, data: bytes = b"") -> None:
        await self._socket.send_bytes(_HEADER.pack(kind, number) + data)


class _Stream:
    """State of a stream on one side."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.waiting_bytes = 0
        self.unacknowledged_bytes = 0
        self.aborted = False
        self.carrying: asyncio.Task[object] | None = None
        self._acknowledged = asyncio.Event()

    async def room(self) -> None:
        while self.unacknowledged_bytes + _PIECE_BYTES > WINDOW_BYTES:
            self._acknowledged.clear()
            await self._acknowledged.wait()

    def acknowledge(self, count: int) -> None:
        self.unacknowledged_bytes -= count
        self._acknowledged.set()

    def abort(self) -> None:
        self.aborted = True
        if self.carrying is not None:
            self.carrying.cancel()
