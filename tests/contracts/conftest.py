"""A client of the bare wire, written from the specs and independent of the server's own code."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support import agent_rig as rigs

Reply = tuple[int, Any, Any]


@dataclass(slots=True, kw_only=True)
class Wire:
    """Requests with one key. `box` is what a create answered."""

    url: str
    http: aiohttp.ClientSession
    key: str = "any"
    box: dict[str, Any] = field(default_factory=dict)

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Status, JSON or text, and headers of a control-plane request."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
        given = {"X-API-KEY": self.key, "Content-Type": "application/json"} | headers
        async with self.http.request(method, self.url + path, data=data, headers=given) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None, response.headers

    async def create(self, path: str = "/v2/sandboxes", **body: Any) -> Wire:
        """A client of a new sandbox."""
        status, box, _ = await self.call("POST", path, {"templateID": "base", **body})
        assert status == 201, box
        return Wire(url=self.url, http=self.http, key=self.key, box=box)

    @property
    def id(self) -> str:
        return str(self.box["sandboxID"])

    def headers(self, content_type: str = "application/json", **more: str) -> dict[str, str]:
        named = {"E2b-Sandbox-Id": self.id, "X-Access-Token": self.box["envdAccessToken"]}
        return {**named, "Content-Type": content_type, "Connect-Protocol-Version": "1", **more}

    async def rpc(self, method: str, message: Any, **headers: str) -> Reply:
        """A unary call of envd."""
        data = message if isinstance(message, bytes) else json.dumps(message)
        async with self.http.post(f"{self.url}/{method}", data=data, headers=self.headers(**headers)) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None, response.headers

    @asynccontextmanager
    async def stream(self, method: str, *messages: Any, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The frames that answer a streaming call; the last is {"end": ...}."""
        data = b"".join(message if isinstance(message, bytes) else frame(message) for message in messages)
        sent = self.headers("application/connect+json", **headers)
        async with self.http.post(f"{self.url}/{method}", data=data, headers=sent) as response:
            assert response.status == 200, await response.text()
            yield _frames(response)

    async def run(self, command: str, **headers: str) -> tuple[bytes, dict[str, Any]]:
        """Standard output of a command, and its end event or the error of its end frame."""
        start = {"process": {"cmd": "/bin/bash", "args": ["-c", command]}, "stdin": False}
        out, end = b"", {}
        async with self.stream("process.Process/Start", start, **headers) as frames:
            async for message in frames:
                event = message.get("event", {})
                out += base64.b64decode(event.get("data", {}).get("stdout", ""))
                end = event.get("end", end) if message.get("end", {}) == {} else message["end"]
        return out, end

    async def files(self, method: str, path: str, data: Any = None, **more: Any) -> tuple[int, bytes]:
        headers = self.headers(more.pop("content_type", "application/octet-stream"))
        query = {"path": path, **more}
        async with self.http.request(method, f"{self.url}/files", params=query, data=data, headers=headers) as response:
            return response.status, await response.read()


def frame(message: Any, flags: int = 0) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(body)) + body


async def _frames(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    while True:
        flags, size = struct.unpack(">BI", await response.content.readexactly(5))
        message = json.loads(await response.content.readexactly(size))
        if flags & 2:
            yield {"end": message}
            return
        yield message


@pytest.fixture
async def wire() -> AsyncIterator[Callable[..., Wire]]:
    """`wire(url, key="any")`: a client."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        yield lambda url, key="any": Wire(url=url, http=http, key=key)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = rigs.write_tokenizer(tmp_path_factory.mktemp("model"))
    return folder
