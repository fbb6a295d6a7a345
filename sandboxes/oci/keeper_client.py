"""Client of a provider's keeper process, with concurrent boots.

Invariants: every boot ends with a pid, a typed error, or LauncherGone when the keeper dies; a boot whose caller is
cancelled is ended.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from headrace.sandboxes.errors import BootFailed, LauncherGone, error_from_name
from headrace.sandboxes.linux.stdlib_process import stdlib_command

_START_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 60.0


class KeeperClient:
    """Owner of the keeper process; `close` it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_tag = 0
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls) -> KeeperClient:
        """Start a keeper. Raises BootFailed, for example when the host refuses a mount namespace."""
        process = await asyncio.create_subprocess_exec(
            *stdlib_command("oci.keeper"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise BootFailed("the keeper process of the oci provider did not start: see its standard error")
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._reader.done()

    async def boot(self, request: dict[str, Any]) -> int:
        """Boot a sandbox; return the pid of its first process. Raises BootFailed, FrozenPathRefused, LauncherGone."""
        self._last_tag += 1
        tag = self._last_tag
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[tag] = answer
        try:
            self._send({**request, "op": "boot", "tag": tag})
            row = await answer
        except BaseException:
            self.end(request["id"])
            raise
        finally:
            del self._waiting[tag]
        if "error" in row:
            raise error_from_name(row["error"], row["message"])
        return int(row["pid"])

    def end(self, sandbox_id: str) -> None:
        """Kill and remove a booting, running or frozen sandbox. Idempotent."""
        with suppress(LauncherGone):
            self._send({"op": "end", "id": sandbox_id})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self.alive or self._process.stdin.is_closing():
            raise LauncherGone("the keeper process died, and its sandboxes with it")
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                row = json.loads(line)
                answer = self._waiting.get(row["tag"])
                if answer is not None and not answer.done():
                    answer.set_result(row)
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(LauncherGone("the keeper process died, and its sandboxes with it"))

    async def close(self) -> None:
        """End every sandbox and the keeper. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reader
