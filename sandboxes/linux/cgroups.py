# ruff: noqa: PTH116, PTH123, PTH208
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Control groups of a launcher's sandboxes, on hosts with version 1, version 2 or both.

Invariants:
- The version is chosen for each controller from the mounts: a hybrid host has memory, cpu and pids on version 1 and an
  almost empty version 2 mount.
- The launcher owns one group `headrace-<pid namespace>-<pid>-<start time>` below its own in each hierarchy, and below
  it one group for each sandbox. The next launcher removes the groups of a launcher that was killed with SIGKILL, which
  it recognizes by their names. Groups with names in another format, or from another pid namespace, are left alone.
- That group's limits are below the host's and below those of the enclosing groups, so that all sandboxes together leave
  memory and processes for other programs.
- The memory limit of a sandbox is set on a group below the sandbox's own, which holds only its commands: whatever they
  fill their memory with, and however they ask the kernel to spare them, the kernel never kills the sandbox's first
  process.
- All paths are relative to descriptors opened before the launcher leaves the host's file tree.
- On version 2, `cgroup_placement` chooses the group below which the launcher's own is created.
- An unavailable controller is in `missing` with the reason: the error's name and the path that failed.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from contextlib import suppress
from typing import Final, NamedTuple

from headrace.sandboxes.linux import host_limits
from headrace.sandboxes.linux.cgroup_placement import place
from headrace.sandboxes.linux.processes import parse_stat
from headrace.sandboxes.linux.syscalls import reason_of

CONTROLLERS: Final = ("memory", "cpu", "cpuacct", "pids", "freezer")
_CPU_PERIOD_US: Final = 100_000
_PREFIX: Final = "headrace-"
_NAME: Final = re.compile(rf"{_PREFIX}(\d+)-(\d+)-(\d+)")
_FREEZE_LOOKS: Final = 200
_COMMANDS: Final = "commands"
_FIRST: Final = "first"
# cpuacct is part of cpu in version 2, and every group there can be frozen.
_NAMES_V2: Final = {"memory": "memory", "cpu": "cpu", "pids": "pids"}


class GroupLimits(NamedTuple):
    """Limits for one sandbox's groups; None means no limit."""

    memory_bytes: int | None
    cpus: float | None
    processes: int | None


class CgroupMount(NamedTuple):
    """Folder where one hierarchy shows this process's own group."""

    version: int
    controllers: frozenset[str]
    folder: str


def find_mounts(mountinfo: str, own_groups: str) -> list[CgroupMount]:
    """Parse /proc/self/mountinfo (proc(5)) and /proc/self/cgroup (cgroups(7))."""
    groups: dict[str, str] = {}
    for line in own_groups.splitlines():
        _, names, path = line.split(":", 2)
        groups.update(dict.fromkeys(names.split(","), path))
    mounts = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2":
            mounts.append(CgroupMount(2, frozenset(), _folder(point, root, groups.get("", "/"))))
        elif kind == "cgroup":
            controllers = frozenset(options.split(",")) & frozenset(CONTROLLERS)
            if controllers:
                mounts.append(CgroupMount(1, controllers, _folder(point, root, groups.get(min(controllers), "/"))))
    return mounts


def _folder(point: str, root: str, group: str) -> str:
    """Return the group's folder in a mount. Inside a container, the mount begins at the container's own group."""
    below = group.removeprefix(root) if root != "/" and group.startswith(root) else group
    return f"{point}/{below.strip('/')}".rstrip("/")


class _Hierarchy:
    """One mount and the launcher's group in it."""

    def __init__(self, mount: CgroupMount, controllers: frozenset[str], parent: str, name: str) -> None:
        self.version = mount.version
        self.controllers = controllers
        self._totals: tuple[tuple[str, str], ...] = ()
        self._folder = parent
        self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._name = name
        self._make()

    def _make(self) -> None:
        try:
            os.mkdir(self._name, 0o755, dir_fd=self._parent)
        except FileExistsError:
            pass
        except OSError as error:
            raise self._named(error, "") from error
        if self.version == 2 and (wanted := self.controllers & _NAMES_V2.keys()):
            self.write("cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(wanted)))
        for file, value in self._totals:
            self.write(file, value)

    def limit_all(self, totals: tuple[tuple[str, str], ...]) -> None:
        """Set control files of the launcher's group, which contains the groups of all sandboxes."""
        self._totals = totals
        self._make()

    def lowest_above(self, file: str) -> int | None:
        return host_limits.lowest_above(self._folder, file)

    def add(self, group: str) -> None:
        try:
            os.mkdir(f"{self._name}/{group}", 0o755, dir_fd=self._parent)
        except FileNotFoundError:
            # Our group was empty and another process removed it, so it can be made again.
            self._make()
            os.mkdir(f"{self._name}/{group}", 0o755, dir_fd=self._parent)

    def add_below(self, group: str) -> None:
        """Make the group for a sandbox's commands. In version 2, the first process needs a group too, because the group
        above may then contain no process ("no internal processes", cgroup-v2.rst)."""
        os.mkdir(f"{self._name}/{group}/{_COMMANDS}", 0o755, dir_fd=self._parent)
        if self.version == 2:
            os.mkdir(f"{self._name}/{group}/{_FIRST}", 0o755, dir_fd=self._parent)
            self.write(f"{group}/cgroup.subtree_control", "+memory")

    def remove(self, group: str) -> None:
        for below in (f"/{_COMMANDS}", f"/{_FIRST}"):
            with suppress(FileNotFoundError):
                os.rmdir(f"{self._name}/{group}{below}", dir_fd=self._parent)
        os.rmdir(f"{self._name}/{group}", dir_fd=self._parent)

    def open(self, path: str) -> int:
        """Open a control file by its path below the launcher's group."""
        try:
            return os.open(f"{self._name}/{path}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._parent)
        except OSError as error:
            raise self._named(error, path) from error

    def write(self, path: str, text: str) -> None:
        descriptor = self.open(path)
        try:
            os.write(descriptor, text.encode())
        except OSError as error:
            raise self._named(error, path) from error
        finally:
            os.close(descriptor)

    def _named(self, error: OSError, path: str) -> OSError:
        # A failed write names no path, and ours are relative to a descriptor.
        whole = f"{self._folder}/{self._name}/{path}".rstrip("/")
        return OSError(error.errno, os.strerror(error.errno or 0), whole)

    def read(self, path: str) -> str:
        descriptor = os.open(f"{self._name}/{path}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._parent)
        try:
            return os.read(descriptor, 1 << 14).decode()
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with suppress(OSError):
            _remove_groups_of(self._parent, self._name)
        os.close(self._parent)

    def sweep(self) -> None:
        """Remove the groups of dead launchers."""
        for name in os.listdir(self._parent):
            if is_orphan(name):
                with suppress(OSError):
                    _remove_groups_of(self._parent, name)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return parse_stat(stat.read()).started


def is_orphan(name: str) -> bool:
    """Return True if `name` is the group of a dead launcher from our pid namespace."""
    found = _NAME.fullmatch(name)
    if found is None or int(found[1]) != _pid_namespace():
        return False
    try:
        return _start_time(int(found[2])) != int(found[3])
    except OSError:
        return True


def _remove_groups_of(parent: int, name: str) -> None:
    """Remove a launcher's group and all groups below it, and kill their processes. Raises OSError if a group
    remains."""
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_groups_of(folder, entry.name)
        with open(os.open("cgroup.procs", os.O_RDONLY, dir_fd=folder), encoding="utf-8") as procs:
            for line in procs:
                with suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=parent)


class Cgroups:
    """Groups of one launcher in all hierarchies. `missing` maps each unavailable controller to the reason."""

    def __init__(self, mounts: list[CgroupMount]) -> None:
        self.missing: dict[str, str] = {}
        self._hierarchies: list[_Hierarchy] = []
        self._by_controller: dict[str, _Hierarchy] = {}
        name = f"{_PREFIX}{_pid_namespace()}-{os.getpid()}-{_start_time(os.getpid())}"
        wanted = set(CONTROLLERS)
        for mount in sorted(mounts):
            controllers = frozenset(wanted if mount.version == 2 else mount.controllers & wanted)
            if not controllers:
                continue
            parent, found = mount.folder, controllers
            if mount.version == 2:
                chosen = place(mount.folder, controllers & _NAMES_V2.keys())
                # Every group of version 2 can be frozen.
                parent, found = chosen.folder, chosen.controllers | (controllers & {"freezer"})
                self.missing.update(chosen.reasons)
            try:
                hierarchy = _Hierarchy(mount, found, parent, name)
            except OSError as error:
                self.missing.update(dict.fromkeys(controllers, reason_of(error)))
                continue
            self._hierarchies.append(hierarchy)
            self._by_controller.update(dict.fromkeys(found, hierarchy))
            for controller in found:
                self.missing.pop(controller, None)
            wanted -= self._by_controller.keys()
        if "cpu" in self._by_controller and self._by_controller["cpu"].version == 2:
            # Version 2 counts processor time in the same controller.
            wanted.discard("cpuacct")
            self.missing.pop("cpuacct", None)
        for controller in wanted:
            self.missing.setdefault(controller, "no control group hierarchy has this controller")
        self.allowed = self._limit_all()
        for hierarchy in self._hierarchies:
            hierarchy.sweep()

    @classmethod
    def of_this_process(cls) -> Cgroups:
        with open("/proc/self/mountinfo", encoding="utf-8") as mountinfo, open("/proc/self/cgroup") as groups:
            return cls(find_mounts(mountinfo.read(), groups.read()))

    def _limit_all(self) -> host_limits.HostLimits:
        """Limit the totals for all sandboxes where the controllers exist, and return them."""
        memory, pids = self._by_controller.get("memory"), self._by_controller.get("pids")
        memory_file = "memory.max" if memory is not None and memory.version == 2 else "memory.limit_in_bytes"
        allowed = host_limits.allowed_to_sandboxes(
            host_limits.read_host(),
            None if memory is None else memory.lowest_above(memory_file),
            None if pids is None else pids.lowest_above("pids.max"),
        )
        totals: dict[_Hierarchy, tuple[tuple[str, str], ...]] = {}
        if memory is not None:
            # Before kernel 5.11 version 1 counts groups below only on request (memory.rst, use_hierarchy).
            tree = (("memory.use_hierarchy", "1"),) if memory.version == 1 else ()
            totals[memory] = (*tree, (memory_file, str(allowed.memory_bytes)))
        if pids is not None:
            totals[pids] = (*totals.get(pids, ()), ("pids.max", str(allowed.processes)))
        for hierarchy, files in totals.items():
            hierarchy.limit_all(files)
        return allowed

    def create(self, group: str, limits: GroupLimits) -> None:
        """Make a sandbox's group in each hierarchy and set its limits. Raises OSError; `remove` then cleans up."""
        for hierarchy in self._hierarchies:
            hierarchy.add(group)
        if "memory" in self._by_controller:
            self._by_controller["memory"].add_below(group)
        if limits.memory_bytes is not None:
            commands, memory = f"{group}/{_COMMANDS}", str(limits.memory_bytes)
            self._set(commands, "memory", ("memory.limit_in_bytes", "memory.max"), (memory, memory))
            with suppress(OSError):
                # Version 1 counts the contents of TCP and UDP sockets separately, and only on request (memory.rst).
                self._set(commands, "memory", ("memory.kmem.tcp.limit_in_bytes", "memory.max"), (memory, memory))
            with suppress(OSError):
                # The files exist only if the kernel accounts swap.
                swap_files = ("memory.memsw.limit_in_bytes", "memory.swap.max")
                self._set(commands, "memory", swap_files, (memory, "0"))
        if limits.cpus is not None:
            quota_us = max(1000, int(limits.cpus * _CPU_PERIOD_US))
            values = (str(quota_us), f"{quota_us} {_CPU_PERIOD_US}")
            self._set(group, "cpu", ("cpu.cfs_quota_us", "cpu.max"), values)
        if limits.processes is not None:
            self._set(group, "pids", ("pids.max", "pids.max"), (str(limits.processes),) * 2)

    def _set(self, group: str, controller: str, files: tuple[str, str], values: tuple[str, str]) -> None:
        """Write a value to a file; both are given for version 1 and for version 2. Does nothing if the controller is
        missing."""
        hierarchy = self._by_controller.get(controller)
        if hierarchy is not None:
            which = hierarchy.version - 1
            hierarchy.write(f"{group}/{files[which]}", values[which])

    def join(self, group: str) -> None:
        """Move the calling process, the sandbox's first, into its groups."""
        for hierarchy in self._hierarchies:
            apart = hierarchy.version == 2 and hierarchy is self._by_controller.get("memory")
            hierarchy.write(f"{group}/{_FIRST}/cgroup.procs" if apart else f"{group}/cgroup.procs", "0")

    def open_commands(self, group: str) -> int:
        """Return a descriptor to which a process writes `0` to be limited like a command, or -1 if there is no memory
        limit."""
        hierarchy = self._by_controller.get("memory")
        if hierarchy is None:
            return -1
        # In version 1 moving only the calling thread is faster (kernel/cgroup/cgroup.c, cgroup_procs_write_start).
        return hierarchy.open(f"{group}/{_COMMANDS}/{('tasks', 'cgroup.procs')[hierarchy.version - 1]}")

    def set_frozen(self, group: str, *, frozen: bool) -> None:
        """Stop or continue all processes in a group. Raises OSError, including when there is no freezer."""
        hierarchy = self._by_controller.get("freezer")
        if hierarchy is None:
            raise OSError(errno.EOPNOTSUPP, f"no freezer: {self.missing['freezer']}")
        if hierarchy.version == 2:
            hierarchy.write(f"{group}/cgroup.freeze", "1" if frozen else "0")
            return
        wanted = "FROZEN" if frozen else "THAWED"
        path = f"{group}/freezer.state"
        for _ in range(_FREEZE_LOOKS):
            # Each write includes the processes that were forked meanwhile (freezer-subsystem.rst).
            hierarchy.write(path, wanted)
            if hierarchy.read(path).strip() == wanted:
                return

    def lift_cpu_limit(self, group: str) -> None:
        """Remove the CPU limit of a sandbox that is about to be killed, because its processes need processor time to
        exit."""
        with suppress(OSError):
            self._set(group, "cpu", ("cpu.cfs_quota_us", "cpu.max"), ("-1", "max"))

    def usage(self, group: str) -> dict[str, float]:
        """Return cpu_s, memory_bytes, processes and oom_kills, omitting those whose controller is missing, and
        memory_peak_bytes and cpu_waited_s if the kernel records them."""
        found: dict[str, float] = {}
        memory, pids, cpu, cpuacct = map(self._by_controller.get, ("memory", "pids", "cpu", "cpuacct"))
        if memory is not None:
            used = ("memory.usage_in_bytes", "memory.current")[memory.version - 1]
            events = ("memory.oom_control", "memory.events")[memory.version - 1]
            rows = dict(line.split() for line in memory.read(f"{group}/{_COMMANDS}/{events}").splitlines())
            found["oom_kills"] = int(rows.get("oom_kill", 0))
            found["memory_bytes"] = int(memory.read(f"{group}/{used}"))
            # Kernels before 5.19 have no memory.peak.
            with suppress(OSError):
                peak = ("memory.max_usage_in_bytes", "memory.peak")[memory.version - 1]
                found["memory_peak_bytes"] = int(memory.read(f"{group}/{peak}"))
        if pids is not None:
            found["processes"] = self.processes(group)
        if cpu is not None:
            rows = dict(line.split() for line in cpu.read(f"{group}/cpu.stat").splitlines())
            throttled_s = int(rows.get("throttled_time", 0)) / 1e9 + int(rows.get("throttled_usec", 0)) / 1e6
            pressure_s = 0.0
            # Of version 2, and only where the kernel counts pressure: "some avg10=0.00 ... total=<microseconds>".
            with suppress(OSError):
                pressure_s = int(cpu.read(f"{group}/cpu.pressure").split("total=", 1)[1].split()[0]) / 1e6
            found["cpu_waited_s"] = max(throttled_s, pressure_s)
        if cpu is not None and cpu.version == 2:
            found["cpu_s"] = int(rows["usage_usec"]) / 1e6
        elif cpuacct is not None and cpuacct.version == 1:
            found["cpu_s"] = int(cpuacct.read(f"{group}/cpuacct.usage")) / 1e9
        return found

    def processes(self, group: str = ".") -> int:
        """Return the number of processes in a sandbox's group, or in those of all sandboxes; 0 if nothing counts
        them."""
        pids = self._by_controller.get("pids")
        with suppress(FileNotFoundError):
            return 0 if pids is None else int(pids.read(f"{group}/pids.current"))
        return 0

    def kernel_memory(self, group: str) -> tuple[int, list[int]]:
        """Return the bytes that the kernel holds for a sandbox's commands, and their process ids; nothing if there is
        no controller of memory, which counts them. Raises OSError."""
        memory = self._by_controller.get("memory")
        if memory is None:
            return 0, []
        commands = f"{group}/{_COMMANDS}"
        processes = [int(line) for line in memory.read(f"{commands}/cgroup.procs").split()]
        if memory.version == 1:
            return int(memory.read(f"{commands}/memory.kmem.usage_in_bytes")), processes
        rows = dict(line.split() for line in memory.read(f"{commands}/memory.stat").splitlines())
        kinds = ("slab_unreclaimable", "kernel_stack", "pagetables")
        return sum(int(rows.get(kind, 0)) for kind in kinds), processes

    def remove(self, group: str) -> None:
        """Remove the groups of a dead sandbox; a group that is still busy is removed with the launcher's."""
        for hierarchy in self._hierarchies:
            with suppress(OSError):
                hierarchy.remove(group)

    def close(self) -> None:
        for hierarchy in self._hierarchies:
            hierarchy.close()
