# ruff: noqa: PTH110, PTH120, PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Memory, process and descriptor limits for all of a launcher's sandboxes together, and each sandbox's share.

Invariants:
- All sandboxes together get less than the host has, and less than any group around the launcher allows. Whatever agents
  do, something is left for other programs.
- Shares are oversold: no kernel limit bounds the open files of several processes together, and the number of sandboxes
  times the processes in each times the descriptors of each process is far more than ever is held. The guard of the
  launcher (`launcher.sandbox_table`) sees to the sum.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

RESERVED_PROCESSES: Final = 33
"""Processes in a sandbox's group besides its commands: the first process, and those that handle files and start
commands."""
MOST_LIVE: Final = 64
DEFAULT_PROCESSES: Final = 512
DEFAULT_OPEN_FILES: Final = 4096
_LEAST_PROCESSES: Final = 64
_LEAST_OPEN_FILES: Final = 64


class HostLimits(NamedTuple):
    """Totals of the host, or of all sandboxes together."""

    memory_bytes: int
    processes: int
    open_files: int


class Share(NamedTuple):
    """Share for one sandbox's commands. The kernel counts threads as processes."""

    processes: int
    open_files: int
    """Limit for each process."""

    def of_all(self, sandboxes: int) -> tuple[int, int]:
        """Return the maximum numbers of processes and of descriptors that this many sandboxes can hold."""
        processes = sandboxes * (self.processes + RESERVED_PROCESSES)
        return processes, processes * self.open_files


def read_host() -> HostLimits:
    """Return this kernel's totals (proc_meminfo(5), proc_sys_kernel(5), proc_sys_fs(5))."""
    memory_bytes = memory_info("MemTotal")
    processes = min(_number("/proc/sys/kernel/pid_max"), _number("/proc/sys/kernel/threads-max"))
    return HostLimits(memory_bytes, processes, _number("/proc/sys/fs/file-max"))


def memory_info(name: str) -> int:
    """Return an entry of /proc/meminfo in bytes (proc_meminfo(5))."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:"))


def lowest_above(folder: str, name: str) -> int | None:
    """Return the lowest limit `name` among a control group and the visible groups above it, or None if there is
    none."""
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
    """Return the totals for all sandboxes; `*_around` are the limits of the groups that enclose the launcher, or
    None."""
    memory_bytes = min(host.memory_bytes, memory_around or host.memory_bytes)
    processes = min(host.processes, processes_around or host.processes)
    return HostLimits(memory_bytes * 7 // 8, processes * 3 // 4, host.open_files * 3 // 4)


def default_live(allowed: HostLimits) -> int:
    """Return the default number of concurrent sandboxes, which is lower on a host too small for that many minimal
    shares."""
    processes = _LEAST_PROCESSES + RESERVED_PROCESSES
    fit = min(allowed.processes // processes, allowed.open_files // (processes * _LEAST_OPEN_FILES))
    return max(1, min(MOST_LIVE, fit))


def share(
    allowed: HostLimits, sandboxes: int, processes: int | None, open_files: int | None, *, counted: bool
) -> Share:
    """Return each sandbox's share. None for `processes` or `open_files` means as many as any program is likely to need;
    `launcher.sandbox_table` sees to the sum. Where no control group counts processes, nobody could: then it is what
    fits this number of sandboxes."""
    most = allowed.processes if counted else allowed.processes // sandboxes
    fit = max(_LEAST_PROCESSES, most - RESERVED_PROCESSES)
    return Share(processes or min(DEFAULT_PROCESSES, fit), open_files or DEFAULT_OPEN_FILES)


def _number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())
