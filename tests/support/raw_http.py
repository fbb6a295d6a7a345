"""Connections of clients that speak HTTP as they like: unfinished requests, wrong ones, and answers read to the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from support.gateway_rig import GUARD_S, address_of


@dataclass(frozen=True)
class RawAnswer:
    """An answer as it stands on the wire."""

    version: str
    status: int
    headers: dict[str, str]
    document: Any


@dataclass
class RawConnection:
    """A connection with what was read from it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self) -> RawAnswer:
        """Read one answer, of a length that its head says."""
        async with asyncio.timeout(GUARD_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            version, status, _ = first.split(" ", 2)
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return RawAnswer(version, int(status), headers, json.loads(body))

    async def last_answer(self) -> RawAnswer:
        """Read one answer, after which the server closes the connection, as the answer says."""
        answer = await self.answer()
        assert answer.headers["connection"] == "close"
        assert await self.rest() == b""
        return answer

    async def rest(self) -> bytes:
        """Read until the server closes the connection."""
        async with asyncio.timeout(GUARD_S):
            return await self.reader.read()


@asynccontextmanager
async def raw_connection(url: str, *pieces: bytes) -> AsyncIterator[RawConnection]:
    """A connection on which these bytes were sent. It ends with the block."""
    reader, writer = await asyncio.open_connection(*address_of(url))
    try:
        connection = RawConnection(reader, writer)
        await connection.send(*pieces)
        yield connection
    finally:
        writer.close()


def head_of(path: str, *lines: str) -> bytes:
    """The head of a POST request."""
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()
