"""A real TCP proxy that loses answers: the request reaches the server, the answer never reaches the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class CuttingProxy:
    """Cuts the connection of every answer for which `cut` counts down to zero, and of all at `drop`."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.cut_answers: set[int] = set()
        """Numbers of answers that are lost, from the next one (0) on."""
        self.answers = 0
        self.requests = bytearray()
        """All that clients have sent."""

    def cut(self, *numbers: int) -> None:
        self.answers, self.cut_answers = 0, set(numbers)

    def drop(self) -> None:
        """Lose every connection now."""
        for writer in self._writers:
            writer.transport.abort()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        pair = {writer, upstream_writer}
        self._writers |= pair
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, upstream_writer, answers=False))
                group.create_task(self._copy(upstream_reader, writer, answers=True))
        except* (ConnectionError, _Lost):
            pass
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await reader.read(1 << 16):
            # Answers here are small: each begins with its own piece.
            if answers and data.startswith(b"HTTP/1.1 "):
                number, self.answers = self.answers, self.answers + 1
                if number in self.cut_answers:
                    raise _Lost
            if not answers:
                self.requests += data
            writer.write(data)
            await writer.drain()
        raise _Lost


class _Lost(Exception):
    pass


@asynccontextmanager
async def cutting_proxy(target: str) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(target)
    server = await asyncio.start_server(proxy.take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy.url = f"http://{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.drop()
