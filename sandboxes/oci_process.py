"""A command in a container, seen from this process: its parent `oci_exec`, its status, its end.

Invariants: whoever waits is answered by what `oci_exec` reports, or by its end; a wait that is cancelled has killed the
command's tree before it returns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.sandboxes.stdlib_process import stdlib_command

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommandEnd(NamedTuple):
    """How a command ended. `exit_code` is None when its parent died without a word."""

    exit_code: int | None
    timed_out: bool
    duration_s: float


class RunningCommand:
    """Made by `start`; `wait` owns its end."""

    def __init__(self, process: asyncio.subprocess.Process, status: asyncio.StreamReader) -> None:
        self._process = process
        self._status = status
        self._ended = asyncio.Event()
        self.end: CommandEnd | None = None

    @classmethod
    async def start(cls, order: dict[str, Any], descriptors: Sequence[int]) -> RunningCommand:
        """Start `oci_exec` with three standard streams, which it owns from now on. Raises OSError."""
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        try:
            process = await asyncio.create_subprocess_exec(
                *stdlib_command("oci_exec"),
                json.dumps({**order, "status": status_write}),
                stdin=descriptors[0],
                stdout=descriptors[1],
                stderr=descriptors[2],
                pass_fds=(status_write,),
                env={},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(status_write)
            for descriptor in descriptors:
                os.close(descriptor)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(status_read, "rb", buffering=0)
        )
        return cls(process, reader)

    async def pid(self) -> int | None:
        """The command's pid on this host, or None when it ended before it could be seen."""
        row = await self._row()
        if "pid" in row:
            return int(row["pid"])
        self._note(row)
        return None

    async def wait(self) -> CommandEnd:
        """Wait for the end; a cancel kills the command's tree."""
        try:
            while self.end is None:
                self._note(await self._row())
            await self._process.wait()
        finally:
            if self._process.returncode is None:
                await asyncio.shield(self.stop())
        return self.end

    async def stop(self) -> None:
        """Kill the tree. Idempotent."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await self._process.wait()

    def _note(self, row: dict[str, Any]) -> None:
        if "pid" not in row:
            self.end = CommandEnd(row.get("exit_code"), bool(row.get("timed_out")), float(row.get("duration_s", 0)))

    async def _row(self) -> dict[str, Any]:
        line = await self._status.readline()
        row: dict[str, Any] = json.loads(line) if line else {}
        return row
