"""Spawned command in a local sandbox, owned by the process that spawned it.

Invariants: its streams are `CommandStreams`; every wait on it ends when its sandbox or launcher ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final, Self

from headrace.sandboxes.base import Stream, TerminalSize
from headrace.sandboxes.errors import ExecTimeout, LauncherGone, SandboxGone, SpecRefused
from headrace.sandboxes.launcher.commands import set_terminal_size
from headrace.sandboxes.launcher.wire import Message, close_all
from headrace.sandboxes.local.client import Exchange, LauncherClient, open_null
from headrace.sandboxes.local.command_streams import CommandStreams, settle

TERMINAL_TIMEOUT_S: Final = 20.0
"""Limit on the wait for a terminal: other processes in the sandbox may have stopped the command before it opened
one."""


class LocalProcess(CommandStreams):
    """Spawned command, created by `start`."""

    def __init__(
        self, client: LauncherClient, exchange: Exchange, pid: int, *, stdin: int, streams: dict[Stream, int]
    ) -> None:
        super().__init__(stdin=stdin, streams=streams, ended=exchange.answer)
        self._client = client
        self._exchange = exchange
        self._pid = pid

    @classmethod
    async def start(
        cls, client: LauncherClient, message: Message, *, stdin: bool, terminal: TerminalSize | None
    ) -> Self:
        """Spawn the command and wait for its pid. Raises SandboxGone, ExecTimeout and the launcher's typed errors."""
        if terminal is not None:
            return await cls._start_terminal(client, {**message, "terminal": (terminal.rows, terminal.columns)})
        source, sink = os.pipe2(os.O_CLOEXEC) if stdin else (open_null(), -1)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        try:
            exchange, pid = await _begin(client, message, (source, out_write, err_write))
        except BaseException:
            close_all(descriptor for descriptor in (sink, out_read, err_read) if descriptor >= 0)
            raise
        streams = {Stream.STDOUT: out_read, Stream.STDERR: err_read}
        return cls(client, exchange, pid, stdin=sink, streams=streams)

    @classmethod
    async def _start_terminal(cls, client: LauncherClient, message: Message) -> Self:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            exchange, pid = await _begin(client, message, (theirs.detach(), open_null(), open_null()))
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(ours, settle, ready)
            try:
                async with asyncio.timeout(TERMINAL_TIMEOUT_S):
                    await ready
            except TimeoutError as error:
                client.cancel(exchange)
                raise ExecTimeout(f"the command opened no terminal in {TERMINAL_TIMEOUT_S} s and was killed") from error
            except asyncio.CancelledError:
                client.cancel(exchange)
                raise
            finally:
                loop.remove_reader(ours)
            # The master end comes with the first byte; without one the command has ended.
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
        master = descriptors[0] if descriptors else -1
        streams = {Stream.TERMINAL: master} if master >= 0 else {}
        return cls(client, exchange, pid, stdin=master, streams=streams)

    @property
    def pid(self) -> int:
        return self._pid

    async def signal(self, number: int) -> None:
        message = {"op": "signal", "target": self._exchange.request_id, "number": number}
        if not self._exchange.answer.done():
            await self._client.request({**message, **self._exchange.sandbox_fields()})

    async def resize(self, size: TerminalSize) -> None:
        if not self._terminal:
            raise SpecRefused("this command has no terminal to resize")
        if self._stdin >= 0:
            set_terminal_size(self._stdin, size.rows, size.columns)

    async def wait(self) -> int:
        try:
            answer = await asyncio.shield(self._exchange.answer)
        except LauncherGone as error:
            raise SandboxGone(str(error)) from error
        if answer["timed_out"]:
            raise ExecTimeout("the command ran longer than its timeout_s and was killed")
        return int(answer["exit_code"])


async def _begin(client: LauncherClient, message: Message, descriptors: tuple[int, ...]) -> tuple[Exchange, int]:
    """Begin a command and return its exchange and pid; the pid is 0 if the command could not be started. Raises
    SandboxGone."""
    exchange = client.begin(message, descriptors)
    try:
        await asyncio.wait((exchange.started, exchange.answer), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        client.cancel(exchange)
        raise
    try:
        return exchange, exchange.started.result() if exchange.started.done() else 0
    except LauncherGone as error:
        raise SandboxGone(str(error)) from error
