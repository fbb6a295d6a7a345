# ruff: noqa: PTH116, PTH208
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Guard on what all sandboxes of a launcher hold together of the host's processes and open files.

Invariants:
- The limits of single sandboxes may add up to more than the host has: programs get what they need, and rarely all hold
  it at once.
- When too much is held, the sandbox that holds most, and more than its even share, has reached its own limit. If there
  is none, new boots wait. What others hold, sandboxes or programs of the host, never ends a sandbox.
- A count of files is what processes have on descriptors, and no more than the sandbox's kernel memory has room for, so
  that what many workers inherit counts about once. Mappings and files on their way in a socket are not counted: while
  they fill the table, boots wait.
- A look takes little time whatever is in the sandboxes, and no error of it ends the launcher.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from headrace.sandboxes.launcher.sandbox_record import SandboxRecord
from headrace.sandboxes.linux.cgroups import Cgroups
from headrace.sandboxes.linux.syscalls import reason_of

_LOOK_S: Final = 0.1
_DEATHS_S: Final = 1.0
"""Time for killed commands to end, before the next look."""
_FILE_BYTES: Final = 192
"""Least size of an open file in the kernel (`struct file`)."""
_TASK_BYTES: Final = 120 << 10
"""About what the kernel holds for one more process: its stack, its tables and its descriptors."""


class HostGuard:
    """Looks at the host's counters, and finds whose limit has been reached."""

    def __init__(self, groups: Cgroups) -> None:
        self._groups = groups
        # Kept open: a process without privileges cannot open a file once they are used up.
        self._file_number = os.open("/proc/sys/fs/file-nr", os.O_RDONLY | os.O_CLOEXEC)
        self._next_s = 0.0
        self.full = ""
        """Why nothing may boot now; empty if anything may."""

    def next_look(self, sandboxes: int) -> float | None:
        """Return the monotonic time of the next look, or None if there is nothing to look at."""
        return self._next_s if sandboxes or self.full else None

    def look(self, sandboxes: Sequence[SandboxRecord]) -> SandboxRecord | None:
        """Return the sandbox whose commands must end, if any."""
        found = None
        try:
            self.full = ""
            most = self._groups.allowed.processes * 7 // 8
            if (held := self._groups.processes()) > most:
                self.full = f"the sandboxes of this host hold {held} processes, and may hold {most}"
                found = _above(most, sandboxes, lambda one, _: self._groups.processes(one.id))
            most = self._groups.allowed.open_files
            if (held := int(os.pread(self._file_number, 100, 0).split()[0])) > most:
                self.full = f"{held} files are open on this host, and new sandboxes need it to be below {most}"
                found = _above(most, sandboxes, self._files) or found
        except OSError as error:
            self.full = f"this host cannot be looked at: {reason_of(error)}"
        self._next_s = time.monotonic() + (_LOOK_S if found is None else _DEATHS_S)
        return found

    def _files(self, sandbox: SandboxRecord, least: int) -> int:
        """Return about how many files a sandbox holds. Descriptors are read only if it may hold more than `least`."""
        kernel_bytes, processes = self._groups.kernel_memory(sandbox.id)
        # Descriptors that many processes have inherited are one file, and take its memory once.
        most = (kernel_bytes - len(processes) * _TASK_BYTES) // _FILE_BYTES
        return most if most <= least else min(most, sum(map(_descriptors, processes)))


def _above(
    most: int, sandboxes: Sequence[SandboxRecord], count: Callable[[SandboxRecord, int], int]
) -> SandboxRecord | None:
    share = most // max(1, len(sandboxes))
    held = {sandbox: count(sandbox, share) for sandbox in sandboxes}
    largest = max(held, key=lambda one: held[one], default=None)
    # The first process of a paused sandbox cannot end anything.
    return largest if largest is not None and held[largest] > share and largest.paused_at is None else None


def _descriptors(pid: int) -> int:
    """Return a process's number of descriptors; 0 if it has ended."""
    with suppress(OSError):
        # Since Linux 6.2 the size of the folder is their number (proc_pid_fd(5)).
        if count := os.stat(f"/proc/{pid}/fd").st_size:
            return count
        # An older kernel, or only the first thread has ended.
        return max(len(os.listdir(f"/proc/{pid}/task/{task}/fd")) for task in os.listdir(f"/proc/{pid}/task"))
    return 0
