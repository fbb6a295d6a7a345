"""Spawned command in a local sandbox, owned by the process that spawned it.

Invariants:
- Every wait on it ends when its sandbox or launcher ends.
- Data is passed directly between the command and this process; nothing is buffered beyond the kernel's pipe.
- A daemon that holds the output open delays the end of the output by at most the grace period. A write to a command
  that is not reading blocks at most until the command ends.
- Descriptors are closed when the output has ended, by `close_stdin`, or when the object is garbage-collected.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final, Self

from headrace.sandboxes.base import Output, Stream, TerminalSize
from headrace.sandboxes.errors import ExecTimeout, LauncherGone, SandboxFileError, SandboxGone, SpecRefused
from headrace.sandboxes.launcher.commands import set_terminal_size
from headrace.sandboxes.launcher.wire import Message, close_all
from headrace.sandboxes.local.capture import OUTPUT_GRACE_S
from headrace.sandboxes.local.client import Exchange, LauncherClient, open_null

_READ_BYTES: Final = 1 << 16
_CTRL_D: Final = b"\x04"


class CommandStreams:
    """Standard streams of a command, on the caller's side: pipes, or a terminal. `stdin` is a descriptor, or -1 if
    there is none. For a terminal, the same descriptor serves input and output. The future `ended` is done once the
    command has ended, with a result or an error."""

    def __init__(self, *, stdin: int, streams: dict[Stream, int], ended: asyncio.Future[Any]) -> None:
        self._stdin = stdin
        self._open = streams
        self._ended = ended
        self._terminal = Stream.TERMINAL in streams
        self._descriptors = {descriptor for descriptor in (stdin, *streams.values()) if descriptor >= 0}
        for descriptor in self._descriptors:
            os.set_blocking(descriptor, False)
        weakref.finalize(self, close_all, self._descriptors)

    async def output(self) -> AsyncIterator[Output]:
        """See `Process.output`."""
        while readable := await self._readable():
            for stream in readable:
                try:
                    data = os.read(self._open[stream], _READ_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    # EIO: the last process has closed the terminal.
                    data = b""
                if data:
                    yield Output(stream=stream, data=data)
                else:
                    self._end_of(stream)
        for stream in list(self._open):
            self._end_of(stream)

    async def _readable(self) -> list[Stream]:
        """Wait for streams with data. Returns an empty list once all have ended, or after the grace period."""
        if not self._open:
            return []
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        for descriptor in self._open.values():
            loop.add_reader(descriptor, settle, ready)
        try:
            await asyncio.wait((ready, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await asyncio.wait((ready,), timeout=OUTPUT_GRACE_S)
        finally:
            for descriptor in self._open.values():
                loop.remove_reader(descriptor)
        poll = select.poll()
        for descriptor in self._open.values():
            poll.register(descriptor, select.POLLIN)
        found = {descriptor for descriptor, _ in poll.poll(0)}
        return [stream for stream, descriptor in self._open.items() if descriptor in found]

    def _end_of(self, stream: Stream) -> None:
        descriptor = self._open.pop(stream)
        if descriptor == self._stdin:
            self._stdin = -1
        self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._descriptors.discard(descriptor)
        os.close(descriptor)

    async def write_stdin(self, data: bytes) -> None:
        """See `Process.write_stdin`."""
        rest = memoryview(data)
        while rest:
            if self._stdin < 0 or self._ended.done():
                raise SandboxFileError("standard input is closed, or the command has ended")
            try:
                rest = rest[os.write(self._stdin, rest) :]
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                ready: asyncio.Future[None] = loop.create_future()
                # A duplicate, because a reader that must stay may watch the same descriptor of a terminal.
                descriptor = os.dup(self._stdin)
                loop.add_writer(descriptor, settle, ready)
                try:
                    await asyncio.wait((ready, self._ended), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    loop.remove_writer(descriptor)
                    os.close(descriptor)
            except OSError as error:
                raise SandboxFileError("the command has closed its standard input") from error

    async def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        if self._stdin < 0:
            return
        if self._terminal:
            with suppress(SandboxFileError):
                await self.write_stdin(_CTRL_D)
            return
        descriptor, self._stdin = self._stdin, -1
        self._close(descriptor)


def settle(future: asyncio.Future[None]) -> None:
    """Complete a future unless it is already done; used as a callback that the loop may call more than once."""
    if not future.done():
        future.set_result(None)


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
