"""The commands of one sandbox: started by a client, followed by any, ended by none of them going away.

Invariants:
- A command is read by one task of the server from its start to its end; clients come and go.
- Its end is kept for who connects later, for the last `KEPT_ENDS` commands of a sandbox.
- A pid names the command inside the sandbox; no number of the host is shown or taken.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headrace.sandboxes.errors import SandboxError
from headrace.serve.e2b_sandboxes.errors import Code, RpcError, rpc_error
from headrace.serve.e2b_sandboxes.output_log import OutputLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.sandboxes.base import Process

KEPT_ENDS: Final = 64
_LOG_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a client asked to run; `env` is the request's own."""

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
    """A started command. `failure` is why it has no exit code: its time is over, or its sandbox is gone."""

    def __init__(self, command: Command, process: Process, sandbox_id: str) -> None:
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
        """Read it to its end."""
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
        """envd's end event: -1 and the signal's name when a client's signal ended it, as Go's os.ProcessState says."""
        code = self.exit_code
        if code is not None and self._signal is not None and code == 128 + self._signal:
            status = f"signal: {signal.strsignal(self._signal) or self._signal}".lower()
            return {"exitCode": -1, "exited": False, "status": status, "error": status}
        end: dict[str, Any] = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
        if code != 0:
            end["error"] = f"exit status {code}"
        return end


class ProcessTable:
    """Commands by pid and by tag."""

    def __init__(self) -> None:
        self._commands: dict[int, RunningCommand] = {}

    def add(self, command: RunningCommand) -> None:
        self._commands.pop(command.pid, None)
        self._commands[command.pid] = command
        ended = [pid for pid, known in self._commands.items() if known.ended]
        for pid in ended[: max(0, len(ended) - KEPT_ENDS)]:
            del self._commands[pid]

    def running(self) -> list[RunningCommand]:
        return [command for command in self._commands.values() if not command.ended]

    def find(self, selector: object, *, ended: bool = False) -> RunningCommand:
        """By {"pid": n} or {"tag": text}; `ended` finds those that have ended as well. Raises RpcError."""
        matches = _matcher(selector)
        for command in reversed(self._commands.values()):
            if matches(command) and (ended or not command.ended):
                return command
        raise RpcError(Code.NOT_FOUND, f"process {selector} not found")


def _matcher(selector: object) -> Callable[[RunningCommand], bool]:
    if isinstance(selector, dict):
        pid, tag = selector.get("pid"), selector.get("tag")
        if isinstance(pid, int) and not isinstance(pid, bool):
            return lambda command: command.pid == pid
        if isinstance(tag, str):
            return lambda command: command.command.tag == tag
    raise RpcError(Code.INVALID_ARGUMENT, "process: give its pid or its tag")
