"""Client side of a command in a container: its parent process `oci.exec`, its streams and its outcome.

Invariants: a wait ends when `oci.exec` reports or dies; nothing is buffered here beyond the pipes; a process tree is
killed by a signal to `oci.exec`, which is its parent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.sandboxes.base import Stream, TerminalSize
from headrace.sandboxes.command_streams import CommandStreams
from headrace.sandboxes.errors import ExecTimeout, SandboxGone, SpecRefused
from headrace.sandboxes.launcher.wire import close_all
from headrace.sandboxes.linux.stdlib_process import stdlib_command

_KILLED: Final = 128 + signal.SIGKILL


class CommandEnd(NamedTuple):
    """The outcome of a command. `exit_code` is None if its parent process died without a report."""

    exit_code: int | None
    timed_out: bool
    duration_s: float


class RunningCommand:
    """A running command, created by `start`. `begun` is set once `pid` is known or the command has ended; `ended` is
    done once `end` is valid."""

    def __init__(self, process: asyncio.subprocess.Process, status: int) -> None:
        self._process = process
        self._status = status
        self._text = b""
        self.begun = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pid = 0
        """The pid on this host; 0 for a command that ended before it was reported."""
        self.end = CommandEnd(None, False, 0.0)
        os.set_blocking(status, False)
        asyncio.get_running_loop().add_reader(status, self._on_status)

    @classmethod
    async def start(cls, order: dict[str, Any], descriptors: Sequence[int]) -> RunningCommand:
        """Start `oci.exec` with three standard streams; this process's copies are closed. Raises OSError."""
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        try:
            process = await asyncio.create_subprocess_exec(
                *stdlib_command("oci.exec"),
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
            close_all(descriptors)
        return cls(process, status_read)

    def _on_status(self) -> None:
        try:
            data = os.read(self._status, 4096)
        except BlockingIOError:
            return
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            row = json.loads(line)
            if "pid" in row:
                self.pid = int(row["pid"])
            else:
                self.end = CommandEnd(row["exit_code"], bool(row["timed_out"]), float(row["duration_s"]))
            self.begun.set()
        if not data:
            asyncio.get_running_loop().remove_reader(self._status)
            os.close(self._status)
            self.begun.set()
            self.ended.set_result(None)

    async def wait(self) -> CommandEnd:
        """Wait for the command to end. Cancelling kills its process tree before this returns."""
        try:
            await asyncio.shield(self.ended)
            await self._process.wait()
        finally:
            if self._process.returncode is None:
                await asyncio.shield(self.stop())
        return self.end

    async def stop(self) -> None:
        """Kill the process tree. Idempotent."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await self._process.wait()


class OciProcess(CommandStreams):
    """A spawned command; see `Process`. `check` raises SandboxGone if the sandbox is dead."""

    def __init__(
        self,
        running: RunningCommand,
        *,
        stdin: int,
        streams: dict[Stream, int],
        timeout_s: float | None,
        check: Callable[[], object],
    ) -> None:
        super().__init__(stdin=stdin, streams=streams, ended=running.ended)
        self._running = running
        self._timeout_s = timeout_s
        self._check = check
        self._killed = False
        # The pid in the innermost pid namespace is the last of the line `NSpid` (proc(5)); 0 when the process is gone.
        self._pid = 0
        with suppress(OSError):
            for line in Path(f"/proc/{running.pid}/status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    self._pid = int(line.split()[-1])

    @property
    def pid(self) -> int:
        return self._pid

    async def signal(self, number: int) -> None:
        """See `Process.signal`."""
        if self._running.ended.done():
            return
        if number == signal.SIGKILL:
            self._killed = True
            await self._running.stop()
            return
        # Its parent has not reaped it yet, so the pid is not reused.
        with suppress(ProcessLookupError):
            os.kill(self._running.pid, number)

    async def resize(self, size: TerminalSize) -> None:
        raise SpecRefused(f"this command has no terminal to resize to {size.rows} rows")

    async def wait(self) -> int:
        """See `Process.wait`."""
        await asyncio.shield(self._running.ended)
        end = self._running.end
        if self._killed:
            return _KILLED
        if end.timed_out:
            raise ExecTimeout(f"command ran longer than timeout_s={self._timeout_s} and was killed")
        if end.exit_code in (None, _KILLED):
            self._check()
        if end.exit_code is None:
            raise SandboxGone("the command's parent process died, and the command with it")
        return end.exit_code
