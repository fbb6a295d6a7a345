"""Standard streams of a spawned command, on the caller's side: pipes, or a terminal.

Invariants:
- Data is passed directly between the command and this process; nothing is buffered beyond the kernel's pipe.
- A daemon that holds the output open delays the end of the output by at most the grace period. A write to a command
  that is not reading blocks at most until the command ends.
- Descriptors are closed when the output has ended, by `close_stdin`, or when the object is garbage-collected.
"""

from __future__ import annotations

import asyncio
import os
import select
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from headrace.sandboxes.base import Output, Stream
from headrace.sandboxes.errors import SandboxFileError
from headrace.sandboxes.launcher.wire import close_all
from headrace.sandboxes.local.capture import OUTPUT_GRACE_S

_READ_BYTES: Final = 1 << 16
_CTRL_D: Final = b"\x04"


class CommandStreams:
    """Base class for processes. `stdin` is a descriptor, or -1 if there is none. For a terminal, the same descriptor
    serves input and output. The future `ended` is done once the command has ended, with a result or an error."""

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
