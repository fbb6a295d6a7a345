"""A spawned command of a local sandbox: its pipes or its terminal, held by the process that spawned it.

Invariants:
- Bytes go straight between the command and this process; nothing is buffered beyond the kernel's pipe.
- A daemon that holds the output delays its end by at most the grace.
- Descriptors are closed when the output has ended, the command has, or the object is forgotten.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from headrace.sandboxes.base import Output, Stream
from headrace.sandboxes.errors import ExecTimeout, LauncherGone, SandboxFileError, SandboxGone, SpecRefused
from headrace.sandboxes.launcher.commands import set_terminal_size
from headrace.sandboxes.launcher.wire import close_all
from headrace.sandboxes.local.client import open_null

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.sandboxes.base import TerminalSize
    from headrace.sandboxes.launcher.wire import Message
    from headrace.sandboxes.local.client import Exchange, LauncherClient

OUTPUT_GRACE_S: Final = 0.2
TERMINAL_TIMEOUT_S: Final = 20.0
"""Others inside may have stopped the command before it has one."""
_READ_BYTES: Final = 1 << 16
_CTRL_D: Final = b"\x04"


class LocalProcess:
    """Made by `start`."""

    def __init__(
        self, client: LauncherClient, exchange: Exchange, pid: int, *, stdin: int, open_streams: dict[Stream, int]
    ) -> None:
        self._client = client
        self._exchange = exchange
        self._pid = pid
        self._stdin = stdin
        self._open = open_streams
        self._terminal = Stream.TERMINAL in open_streams
        self._descriptors = {descriptor for descriptor in (stdin, *open_streams.values()) if descriptor >= 0}
        for descriptor in self._descriptors:
            os.set_blocking(descriptor, False)
        weakref.finalize(self, close_all, self._descriptors)

    @classmethod
    async def start(
        cls, client: LauncherClient, message: Message, *, stdin: bool, terminal: TerminalSize | None
    ) -> Self:
        """Send the spawn and wait for its number. Raises SandboxGone, ExecTimeout and the launcher's typed error."""
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
        return cls(client, exchange, pid, stdin=sink, open_streams=streams)

    @classmethod
    async def _start_terminal(cls, client: LauncherClient, message: Message) -> Self:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            exchange, pid = await _begin(client, message, (theirs.detach(), open_null(), open_null()))
            try:
                async with asyncio.timeout(TERMINAL_TIMEOUT_S):
                    master = await _receive_descriptor(ours)
            except TimeoutError as error:
                client.cancel(exchange)
                raise ExecTimeout(f"the command opened no terminal in {TERMINAL_TIMEOUT_S} s and was killed") from error
            except asyncio.CancelledError:
                client.cancel(exchange)
                raise
        return cls(client, exchange, pid, stdin=master, open_streams={Stream.TERMINAL: master} if master >= 0 else {})

    @property
    def pid(self) -> int:
        return self._pid

    async def output(self) -> AsyncIterator[Output]:
        """See `Process.output`."""
        while readable := await self._readable():
            for stream, descriptor in readable:
                try:
                    data = os.read(descriptor, _READ_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    # EIO: the last process let go of the terminal.
                    data = b""
                if data:
                    yield Output(stream=stream, data=data)
                else:
                    self._end_of(stream)
        for stream in list(self._open):
            self._end_of(stream)

    async def _readable(self) -> list[tuple[Stream, int]]:
        """Streams with something to read; none once all have ended, or the grace after the command's end is over."""
        if not self._open:
            return []
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        for descriptor in self._open.values():
            loop.add_reader(descriptor, _settle, ready)
        try:
            await asyncio.wait((ready, self._exchange.answer), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await asyncio.wait((ready,), timeout=OUTPUT_GRACE_S)
        finally:
            for descriptor in self._open.values():
                loop.remove_reader(descriptor)
        poll = select.poll()
        for descriptor in self._open.values():
            poll.register(descriptor, select.POLLIN)
        found = {descriptor for descriptor, _ in poll.poll(0)}
        return [(stream, descriptor) for stream, descriptor in self._open.items() if descriptor in found]

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
            if self._stdin < 0 or self._exchange.answer.done():
                raise SandboxFileError("standard input is closed, or the command has ended")
            try:
                rest = rest[os.write(self._stdin, rest) :]
            except BlockingIOError:
                await self._writable()
            except OSError as error:
                raise SandboxFileError("the command has closed its standard input") from error

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        # A duplicate: the same descriptor of a terminal may be watched by a reader, which must stay.
        descriptor = os.dup(self._stdin)
        loop.add_writer(descriptor, _settle, ready)
        try:
            await asyncio.wait((ready, self._exchange.answer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_writer(descriptor)
            os.close(descriptor)

    async def close_stdin(self) -> None:
        if self._stdin < 0:
            return
        if self._terminal:
            with suppress(SandboxFileError):
                await self.write_stdin(_CTRL_D)
            return
        descriptor, self._stdin = self._stdin, -1
        self._close(descriptor)

    async def signal(self, number: int) -> None:
        message = {"op": "signal", "target": self._exchange.request_id, "number": number}
        if not self._exchange.answer.done():
            await self._client.request({**message, **self._exchange.names()})

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
    """The exchange and the number of the process, 0 when none could be started. Raises SandboxGone."""
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


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _receive_descriptor(stream: socket.socket) -> int:
    """The descriptor that comes with the first byte, or -1 when the other side ended without one."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(stream, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(stream)
    _, descriptors, _, _ = socket.recv_fds(stream, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return descriptors[0] if descriptors else -1
