"""Capture of a hostile command's output: the first bytes are kept and the rest is discarded in the kernel.

Invariants: the writer never blocks on this process, whatever it writes. Memory is bounded by `max_bytes`. A daemon that
keeps the pipe open delays `finish` by at most its grace period.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import suppress
from typing import Final, Self

OUTPUT_GRACE_S: Final = 0.2
"""Time to wait for output streams that a daemon may hold open after its command has ended."""
_READ_BYTES: Final = 1 << 16
_DISCARD_BYTES: Final = 1 << 20


class OutputCapture:
    """Pipe whose write end is passed to a command. An async context manager; leaving it closes the read end."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._retained = bytearray()
        self._null = -1
        self._ended = asyncio.Event()
        self.truncated = False
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._read_end, self._on_readable)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        if self._null >= 0:
            os.close(self._null)

    @property
    def held(self) -> bool:
        """True while a process has the write end open."""
        return not self._ended.is_set()

    async def finish(self, grace_s: float) -> bytes:
        """Return the retained bytes once the pipe has ended, or `grace_s` after the call."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        return bytes(self._retained)

    def _on_readable(self) -> None:
        try:
            if self.truncated:
                # splice(2) moves pages from the pipe to /dev/null without copying them.
                count = os.splice(self._read_end, self._null, _DISCARD_BYTES, flags=os.SPLICE_F_NONBLOCK)
            else:
                data = os.read(self._read_end, _READ_BYTES)
                count, room = len(data), self._max_bytes - len(self._retained)
                self._retained += data[:room]
                if count > room:
                    self.truncated = True
                    self._null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
                    with suppress(OSError):
                        # A larger pipe means fewer wake-ups; the kernel may refuse it to an unprivileged user.
                        fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, _DISCARD_BYTES)
        except BlockingIOError:
            return
        if count == 0:
            asyncio.get_running_loop().remove_reader(self._read_end)
            self._ended.set()


def memory_file(data: bytes) -> int:
    """Return a descriptor for a read-only memory file with this content, for use as standard input that needs no
    writer."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
