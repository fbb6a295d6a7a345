"""A spawned command behind an exec server, which survives lost connections."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any, Final

from headrace.sandboxes.base import Output, Stream
from headrace.sandboxes.errors import ExecResultLost, SandboxGone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.sandboxes.base import TerminalSize
    from headrace.sandboxes.remote.http import RemoteHttp

_PIECE_BYTES: Final = 1 << 18
_SIGKILL: Final = 9


class RemoteProcess:
    """A spawned command, made by `RemoteSandbox.spawn`."""

    def __init__(self, url: str, secret: str, http: RemoteHttp) -> None:
        self.pid = 0
        self._url = url
        self._secret = secret
        self._http = http
        self._sent_bytes = 0
        self._writing = asyncio.Lock()

    async def _request(self, method: str, path: str, *, repeatable: bool = True, **options: Any) -> Any:
        return await self._http.call(method, self._url + path, self._secret, repeatable=repeatable, **options)

    async def output(self) -> AsyncIterator[Output]:
        """See `Process.output`. The server buffers up to 256 KiB."""
        taken, ended = 0, False
        while not ended:
            try:
                answer = await self._request("GET", "/output", query={"after": str(taken)})
            except (SandboxGone, ExecResultLost):
                # `wait` raises the reason.
                return
            ended = answer["ended"]
            for stream, data in answer["pieces"]:
                taken += 1
                yield Output(stream=Stream(stream), data=base64.b64decode(data))

    async def write_stdin(self, data: bytes) -> None:
        async with self._writing:
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                body = {"offset": self._sent_bytes, "data": base64.b64encode(piece).decode()}
                await self._request("POST", "/stdin", body=body)
                self._sent_bytes += len(piece)

    async def close_stdin(self) -> None:
        await self._request("DELETE", "/stdin")

    async def signal(self, number: int) -> None:
        """See `Process.signal`. After a lost response only SIGKILL is repeated."""
        kills = number == _SIGKILL
        await self._request("POST", "/signal", body={"number": number}, repeatable=kills, teardown=kills)

    async def resize(self, size: TerminalSize) -> None:
        await self._request("POST", "/size", body={"rows": size.rows, "columns": size.columns})

    async def wait(self) -> int:
        """See `Process.wait`. Raises ExecResultLost if the server was restarted."""
        while (code := (await self._request("GET", "/end"))["exit_code"]) is None:
            pass
        return int(code)
