"""A sandbox's commands, which any client can follow and which keep running when clients disconnect.

Invariants:
- One task of the server reads a command's output from beginning to end, independently of clients.
- The results of a sandbox's last `MAX_ENDED` commands are stored.
- Pids are those inside the sandbox; host pids are neither shown nor accepted.
- At most `limit_bytes` plus one piece are buffered. While there are readers, a full log blocks the command; a reader
  gets every piece after its position, in order.
- Without readers the command is not blocked: the last `limit_bytes` are retained for the next reader, and the dropped
  ones are counted in `dropped_bytes`.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Self

from headrace.sandboxes.base import Output, Process
from headrace.sandboxes.errors import SandboxError
from headrace.serve.sandbox_servers.e2b_state.errors import Code, RpcError, rpc_error

MAX_ENDED: Final = 64
_LOG_BYTES: Final = 256 << 10


class OutputLog:
    """Output of one command, for any number of readers."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: deque[Output] = deque()
        self._first = 0
        self._held_bytes = 0
        self._closed = False
        self._readers: set[OutputReader] = set()
        self._changed = asyncio.Condition()
        self.dropped_bytes = 0

    async def append(self, piece: Output) -> None:
        """Append a piece; wait while a reader is `limit_bytes` behind."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._readers or self._held_bytes < self._limit_bytes)
            self._pieces.append(piece)
            self._held_bytes += len(piece.data)
            while not self._readers and self._held_bytes > self._limit_bytes:
                self.dropped_bytes += self._drop_first()
            self._changed.notify_all()

    def _drop_first(self) -> int:
        size = len(self._pieces.popleft().data)
        self._first += 1
        self._held_bytes -= size
        return size

    async def close(self) -> None:
        """Close the log. Readers get the remaining pieces and then None."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def reader(self) -> OutputReader:
        """Return a reader that starts with the oldest buffered piece."""
        return OutputReader(self)

    async def _next(self, reader: OutputReader) -> Output | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or reader.place < self._first + len(self._pieces))
            if reader.place == self._first + len(self._pieces):
                return None
            piece = self._pieces[reader.place - self._first]
            reader.place += 1
            behind = min(other.place for other in self._readers)
            while self._first < behind:
                self._drop_first()
            self._changed.notify_all()
            return piece

    async def _leave(self, reader: OutputReader) -> None:
        self._readers.discard(reader)
        async with self._changed:
            self._changed.notify_all()


class OutputReader:
    """A reader of a log, used as an async context manager. Pieces that it has not read are retained for the next
    reader."""

    def __init__(self, log: OutputLog) -> None:
        self._log = log
        self.place = 0

    async def __aenter__(self) -> Self:
        self.place = self._log._first  # noqa: SLF001 - both classes share this state
        self._log._readers.add(self)  # noqa: SLF001
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self._log._leave(self))  # noqa: SLF001

    async def next(self) -> Output | None:
        """Return the next piece, or None at the end."""
        return await self._log._next(self)  # noqa: SLF001


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command as a client requested it; `env` contains only the variables of the request."""

    program: str
    arguments: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    tag: str | None = None
    terminal: bool = False

    def to_json(self) -> dict[str, Any]:
        config: dict[str, Any] = {"cmd": self.program, "args": list(self.arguments), "envs": self.env}
        if self.cwd is not None:
            config["cwd"] = self.cwd
        return config


class RunningCommand:
    """A started command. `failure` says why there is no exit code: a timeout or a dead sandbox."""

    def __init__(self, command: CommandRequest, process: Process, sandbox_id: str) -> None:
        self.command = command
        self.process = process
        self.log = OutputLog(_LOG_BYTES)
        self.exit_code: int | None = None
        self.failure: RpcError | None = None
        self._sandbox_id = sandbox_id
        self._signal: int | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.exit_code is not None or self.failure is not None

    async def follow(self) -> None:
        """Read the output until the command ends."""
        try:
            async for piece in self.process.output():
                await self.log.append(piece)
            self.exit_code = await self.process.wait()
        except SandboxError as error:
            self.failure = rpc_error(error, self._sandbox_id)
        finally:
            if not self.ended:
                self.failure = RpcError(Code.UNAVAILABLE, "the server was stopped")
            await self.log.close()

    async def signal(self, number: int) -> None:
        self._signal = number
        await self.process.signal(number)

    def end_event(self) -> dict[str, Any]:
        """Return envd's end event. If a client's signal ended the command, the event contains -1 and the signal's name,
        like Go's os.ProcessState."""
        code = self.exit_code
        if code is not None and self._signal is not None and code == 128 + self._signal:
            status = f"signal: {signal.strsignal(self._signal) or self._signal}".lower()
            return {"exitCode": -1, "exited": False, "status": status, "error": status}
        end: dict[str, Any] = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
        if code != 0:
            end["error"] = f"exit status {code}"
        return end


class ProcessTable:
    """Table of commands by pid and by tag."""

    def __init__(self) -> None:
        self._commands: dict[int, RunningCommand] = {}

    def add(self, command: RunningCommand) -> None:
        self._commands.pop(command.pid, None)
        self._commands[command.pid] = command
        ended = [pid for pid, known in self._commands.items() if known.ended]
        for pid in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._commands[pid]

    def running(self) -> list[RunningCommand]:
        return [command for command in self._commands.values() if not command.ended]

    def find(self, selector: object, *, ended: bool = False) -> RunningCommand:
        """Find a command by {"pid": n} or {"tag": text}; with `ended`, commands that have ended are included. Raises
        RpcError."""
        pid, tag = (selector.get("pid"), selector.get("tag")) if isinstance(selector, dict) else (None, None)
        by_pid = isinstance(pid, int) and not isinstance(pid, bool)
        if not by_pid and not isinstance(tag, str):
            raise RpcError(Code.INVALID_ARGUMENT, "process: must have a pid or a tag")
        for command in reversed(self._commands.values()):
            matches = command.pid == pid if by_pid else command.command.tag == tag
            if matches and (ended or not command.ended):
                return command
        raise RpcError(Code.NOT_FOUND, f"process {selector} not found")
