# ruff: noqa: PTH102, PTH106, PTH110, PTH123, PTH208
# (pathlib is not imported, because `oci.exec` loads this module for every command)
"""Control groups of one container: their paths, their counters, and killing all processes of a sub-group.

Invariants: versions 1, 2 and the hybrid of both are distinguished by their mounts; a kill returns only when the group
is empty or a time limit has passed, and no fork escapes it (the group is frozen first on version 1; version 2 has
`cgroup.kill`).

Linux: Documentation/admin-guide/cgroup-v1/, cgroup-v2.rst.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Final, NamedTuple

_MOUNT: Final = "/sys/fs/cgroup"
_KILL_TRIES: Final = 200
_KILL_PAUSE_S: Final = 0.01


def is_version_2() -> bool:
    return os.path.exists(f"{_MOUNT}/cgroup.controllers")


def folder(controller: str, group: str) -> str:
    return f"{_MOUNT}{group}" if is_version_2() else f"{_MOUNT}/{controller}{group}"


def sub_group_argument(name: str) -> str:
    """Return the argument of `runc exec --cgroup` for a sub-group that `SubGroup` can kill."""
    return name if is_version_2() else f"freezer:{name}"


def thaw(group: str) -> None:
    """Resume a paused container, so that a kill takes effect."""
    path, text = (f"{folder('', group)}/cgroup.freeze", "0")
    if not is_version_2():
        path, text = (f"{folder('freezer', group)}/freezer.state", "THAWED")
    with suppress(OSError), open(path, "r+", encoding="ascii") as file:
        file.write(text)


def remove(group: str) -> None:
    """Remove the empty groups of a dead container, which the runtime leaves behind if it was killed."""
    parents = [_MOUNT] if is_version_2() else [f"{_MOUNT}/{name}" for name in os.listdir(_MOUNT)]
    for parent in parents:
        for folder_path, _, _ in os.walk(f"{parent}{group}", topdown=False):
            with suppress(OSError):
                os.rmdir(folder_path)


class SubGroup:
    """The sub-group of one command, below the container's own group. If the path is empty, all methods do nothing."""

    def __init__(self, path: str) -> None:
        self._path = path

    def make(self) -> None:
        if self._path:
            with suppress(FileExistsError):
                os.mkdir(self._path)

    def remove(self) -> None:
        """Remove the group if it is empty. A group that still contains a daemon is removed by the runtime, together
        with the container."""
        if self._path:
            with suppress(OSError):
                os.rmdir(self._path)

    def kill(self) -> None:
        """Kill all processes; returns once none is left, or after about 2 s."""
        if not self._path:
            return
        for _ in range(_KILL_TRIES):
            self._write("cgroup.kill", "1")
            self._write("freezer.state", "FROZEN")
            pids = []
            with suppress(OSError), open(f"{self._path}/cgroup.procs", encoding="ascii") as file:
                pids = [int(line) for line in file]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._write("freezer.state", "THAWED")
            if not pids:
                return
            # The kernel has no notification for a version 1 group that becomes empty.
            time.sleep(_KILL_PAUSE_S)

    def _write(self, name: str, text: str) -> None:
        with suppress(OSError), open(f"{self._path}/{name}", "r+", encoding="ascii") as file:
            file.write(text)


class GroupUsage(NamedTuple):
    cpu_s: float
    memory_bytes: int
    memory_limit_bytes: int | None
    processes: int
    cpus: float | None
    oom_kills: int
    memory_peak_bytes: int | None


def usage(group: str) -> GroupUsage:
    """Return the current usage of a container. Raises FileNotFoundError if it is gone."""
    if is_version_2():
        path = folder("", group)
        most = _read(f"{path}/memory.max").strip()
        quota, period = _read(f"{path}/cpu.max").split()
        return GroupUsage(
            cpu_s=_field(f"{path}/cpu.stat", "usage_usec") / 1e6,
            memory_bytes=int(_read(f"{path}/memory.current")),
            memory_limit_bytes=None if most == "max" else int(most),
            processes=int(_read(f"{path}/pids.current")),
            cpus=None if quota == "max" else int(quota) / int(period),
            oom_kills=_field(f"{path}/memory.events", "oom_kill"),
            memory_peak_bytes=_peak(f"{path}/memory.peak"),
        )
    memory, cpu = folder("memory", group), folder("cpu", group)
    limit = int(_read(f"{memory}/memory.limit_in_bytes"))
    quota_us, period_us = int(_read(f"{cpu}/cpu.cfs_quota_us")), int(_read(f"{cpu}/cpu.cfs_period_us"))
    return GroupUsage(
        cpu_s=int(_read(f"{folder('cpuacct', group)}/cpuacct.usage")) / 1e9,
        memory_bytes=int(_read(f"{memory}/memory.usage_in_bytes")),
        memory_limit_bytes=None if limit >= 1 << 60 else limit,
        processes=int(_read(f"{folder('pids', group)}/pids.current")),
        cpus=None if quota_us < 0 else quota_us / period_us,
        oom_kills=_field(f"{memory}/memory.oom_control", "oom_kill"),
        memory_peak_bytes=_peak(f"{memory}/memory.max_usage_in_bytes"),
    )


def _peak(path: str) -> int | None:
    """Return the most memory used; None if the kernel does not record it."""
    try:
        return int(_read(path))
    except OSError:
        return None


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _field(path: str, name: str) -> int:
    rows = (line.split() for line in _read(path).splitlines())
    return next((int(row[1]) for row in rows if row[0] == name), 0)
