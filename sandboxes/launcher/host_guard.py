# ruff: noqa: PTH116, PTH123, PTH208
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Guard on what all sandboxes of a launcher hold together of the host's processes and open files.

Invariants:
- The limits of single sandboxes may add up to more than the host has: programs get what they need, and rarely all hold
  it at once. Only then is there anything to look at.
- When too much is held, the sandbox that holds most, and more than its even share, has reached its own limit. If there
  is none, new boots wait. What others hold, sandboxes or programs of the host, never ends a sandbox.
- Counted are descriptors and mapped files, whose descriptors may be closed. Files on their way in a socket are not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from headrace.sandboxes.launcher.sandbox_record import SandboxRecord
from headrace.sandboxes.linux.cgroups import Cgroups
from headrace.sandboxes.linux.host_limits import Share
from headrace.sandboxes.linux.processes import read_processes, tree_of

_LOOK_S: Final = 0.1
_DEATHS_S: Final = 1.0
"""Time for killed commands to end, before the next look."""
_PAUSE: Final = 10
"""Times the length of a look until the next one: counting must not take the launcher's time."""
_MAPS_PER_FILE: Final = 4
"""A library is mapped in four or five pieces, which hold one open file."""


class HostGuard:
    """Looks at the host's counters, and finds whose limit has been reached."""

    def __init__(self, groups: Cgroups, share: Share, max_live: int) -> None:
        self._groups = groups
        self._oversold = not share.fits(max_live, groups.allowed)
        self._next_s = 0.0
        self.full = ""
        """Why nothing may boot now; empty if anything may."""

    def next_look(self, sandboxes: int) -> float | None:
        """Return the monotonic time of the next look, or None if there is nothing to look at."""
        return self._next_s if self._oversold and sandboxes else None

    def look(self, sandboxes: Sequence[SandboxRecord]) -> SandboxRecord | None:
        """Return the sandbox whose commands must end, if any."""
        begin_s = time.monotonic()
        self.full, found = "", None
        most = self._groups.allowed.processes * 7 // 8
        if (held := self._groups.processes()) > most:
            self.full = f"the sandboxes of this host hold {held} processes, and may hold {most}"
            found = self._above(most, {one: self._groups.processes(one.id) for one in sandboxes})
        with open("/proc/sys/fs/file-nr", encoding="ascii") as file:
            held = int(file.read().split()[0])
        if held > (most := self._groups.allowed.open_files):
            self.full = f"{held} files are open on this host, and new sandboxes need it to be below {most}"
            entries = read_processes()
            trees = {one: tree_of(one.pid, entries, strays=False) for one in sandboxes}
            found = self._above(most, {one: sum(map(open_files, tree)) for one, tree in trees.items()}) or found
        end_s = time.monotonic()
        self._next_s = end_s + max(_LOOK_S if found is None else _DEATHS_S, (end_s - begin_s) * _PAUSE)
        return found

    @staticmethod
    def _above(most: int, held: dict[SandboxRecord, int]) -> SandboxRecord | None:
        largest = max(held, key=lambda one: held[one], default=None)
        return largest if largest is not None and held[largest] > most // len(held) else None


def open_files(pid: int) -> int:
    """Return about how many open files a process holds; 0 if it has ended."""
    with suppress(OSError):
        folder = f"/proc/{pid}/fd"
        # Since Linux 6.2 the size of the folder is their number (proc_pid_fd(5)).
        descriptors = os.stat(folder).st_size or len(os.listdir(folder))
        return descriptors + len(os.listdir(f"/proc/{pid}/map_files")) // _MAPS_PER_FILE
    return 0
