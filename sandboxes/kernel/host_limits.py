# ruff: noqa: PTH110, PTH120, PTH123
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""Memory, processes and descriptors that all sandboxes of a launcher may take together, and one sandbox's share.

Invariants:
- All sandboxes together get less than the host has, and less than a group around the launcher allows: whatever agents
  do, some is left for everybody else.
- Nothing in the kernel limits the open files of several processes together. Only processes times descriptors of each,
  times the number of sandboxes, does: the defaults are chosen so that this product fits. What was chosen in the
  configuration is kept as it is; `fits` tells whether the sums do.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

RESERVED_PROCESSES: Final = 33
"""What a sandbox's group allows beyond its commands: its first process, and its work for files and new commands."""
MOST_LIVE: Final = 64
MOST_PROCESSES: Final = 512
MOST_OPEN_FILES: Final = 4096
_LEAST_PROCESSES: Final = 64
_LEAST_OPEN_FILES: Final = 64
_MODEST_OPEN_FILES: Final = 128
"""Where not everything fits, processes are given up first, down to their least, until each has this many."""


class HostLimits(NamedTuple):
    memory_bytes: int
    processes: int
    open_files: int


class Share(NamedTuple):
    """What one sandbox's commands get. The kernel counts threads as processes."""

    processes: int
    open_files: int
    """Of one process."""

    def of_all(self, sandboxes: int) -> tuple[int, int]:
        """The most processes, and descriptors, that so many sandboxes can hold."""
        processes = sandboxes * (self.processes + RESERVED_PROCESSES)
        return processes, processes * self.open_files

    def fits(self, sandboxes: int, allowed: HostLimits) -> bool:
        processes, open_files = self.of_all(sandboxes)
        return processes <= allowed.processes and open_files <= allowed.open_files


def read_host() -> HostLimits:
    """What this kernel has in all (proc_meminfo(5), proc_sys_kernel(5), proc_sys_fs(5))."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        memory_bytes = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemTotal:"))
    processes = min(_number("/proc/sys/kernel/pid_max"), _number("/proc/sys/kernel/threads-max"))
    return HostLimits(memory_bytes, processes, _number("/proc/sys/fs/file-max"))


def lowest_above(folder: str, name: str) -> int | None:
    """The lowest limit `name` of a control group and those above it that are seen; None without any."""
    found: int | None = None
    while os.path.exists(f"{folder}/cgroup.procs"):
        if os.path.exists(f"{folder}/{name}"):
            with open(f"{folder}/{name}", encoding="ascii") as file:
                text = file.read().strip()
            if text != "max":
                found = int(text) if found is None else min(found, int(text))
        folder = os.path.dirname(folder)
    return found


def allowed_to_sandboxes(host: HostLimits, memory_around: int | None, processes_around: int | None) -> HostLimits:
    """The two are limits of groups around the launcher, None for none."""
    memory_bytes = min(host.memory_bytes, memory_around or host.memory_bytes)
    processes = min(host.processes, processes_around or host.processes)
    return HostLimits(memory_bytes * 7 // 8, processes * 3 // 4, host.open_files * 3 // 4)


def default_live(allowed: HostLimits) -> int:
    """Sandboxes at once, where nobody chose: fewer on a host too small for so many of the least shares."""
    processes = _LEAST_PROCESSES + RESERVED_PROCESSES
    fit = min(allowed.processes // processes, allowed.open_files // (processes * _LEAST_OPEN_FILES))
    return max(1, min(MOST_LIVE, fit))


def share(allowed: HostLimits, sandboxes: int, processes: int | None, open_files: int | None) -> Share:
    """One of so many. None: as much as fits, up to what any program is likely to need."""
    files_each = allowed.open_files // sandboxes
    if processes is None:
        room = allowed.processes // sandboxes
        if open_files is not None:
            room = min(room, files_each // open_files)
        elif files_each < room * _MODEST_OPEN_FILES:
            room = files_each // _MODEST_OPEN_FILES
        processes = max(_LEAST_PROCESSES, min(MOST_PROCESSES, room - RESERVED_PROCESSES))
    if open_files is None:
        room = files_each // (processes + RESERVED_PROCESSES)
        open_files = max(_LEAST_OPEN_FILES, min(MOST_OPEN_FILES, room))
    return Share(processes, open_files)


def _number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())
