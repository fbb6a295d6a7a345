"""The standard output of a hostile command: the first bytes are kept, the rest is drained in the kernel.

Invariants: the writer never blocks on us, whatever it writes; memory is bounded by `max_bytes`; a daemon that keeps the
pipe open delays nothing beyond the grace given to `finish`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

OUTPUT_GRACE_S: Final = 0.2
"""How long output that a daemon may hold is waited for, once its command has ended."""
_READ_BYTES: Final = 1 << 16
_DISCARD_BYTES: Final = 1 << 20


class OutputCapture:
    """A pipe whose write end goes to a command. An async context manager: leaving it closes the read end."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._null = -1
        self._ended = asyncio.Event()
        self.truncated = False
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._read_end, self._on_readable)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        if self._null >= 0:
            os.close(self._null)

    @property
    def held(self) -> bool:
        """Somebody still holds the write end."""
        return not self._ended.is_set()

    async def finish(self, grace_s: float) -> bytes:
        """What was kept, once the pipe has ended or `grace_s` after the command itself ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        return bytes(self._kept)

    def _on_readable(self) -> None:
        try:
            count = self._discard() if self.truncated else self._keep()
        except BlockingIOError:
            return
        if count == 0:
            asyncio.get_running_loop().remove_reader(self._read_end)
            self._ended.set()

    def _keep(self) -> int:
        data = os.read(self._read_end, _READ_BYTES)
        room = self._max_bytes - len(self._kept)
        self._kept += data[:room]
        if len(data) > room:
            self.truncated = True
            self._null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            with suppress(OSError):
                # A wider pipe means fewer wake-ups; the kernel may refuse it to an unprivileged user.
                fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, _DISCARD_BYTES)
        return len(data)

    def _discard(self) -> int:
        """Move pages from the pipe to /dev/null without copying them (splice(2))."""
        return os.splice(self._read_end, self._null, _DISCARD_BYTES, flags=os.SPLICE_F_NONBLOCK)


def memory_file(data: bytes) -> int:
    """A read-only file in memory that holds `data`, positioned at its start: standard input that needs no writer."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
