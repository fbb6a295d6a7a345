# ruff: noqa: PTH123
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""What the boot of a sandbox takes on the launcher's side: limits, ids, control groups, a layer, the first process.

Invariants:
- A boot that fails here has taken nothing when it returns; what one took is given back once, when its sandbox is dead.
- What a sandbox may hold without a process that owns it leaves room for commands in its memory.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

from headrace.sandboxes.kernel import rootfs, syscalls
from headrace.sandboxes.kernel.cgroups import GroupLimits
from headrace.sandboxes.kernel.host_limits import default_live, share
from headrace.sandboxes.kernel.id_blocks import FIRST_ID, IDS_PER_SANDBOX, RANGES_PER_BLOCK, IdBlocks
from headrace.sandboxes.kernel.id_maps import IdMaps
from headrace.sandboxes.kernel.reasons import reason_of
from headrace.sandboxes.kernel.seccomp import filter_program
from headrace.sandboxes.launcher import requests
from headrace.sandboxes.launcher.commands import Limits
from headrace.sandboxes.launcher.image_table import ImageTable
from headrace.sandboxes.launcher.init import RESERVED_PROCESSES, Plan, run_init
from headrace.sandboxes.launcher.leases import IdRanges, OneId
from headrace.sandboxes.launcher.settings import Refused
from headrace.sandboxes.launcher.wire import Channel

if TYPE_CHECKING:
    from headrace.sandboxes.kernel.cgroups import Cgroups
    from headrace.sandboxes.launcher.sandbox_record import Record
    from headrace.sandboxes.launcher.settings import Settings
    from headrace.sandboxes.launcher.wire import Message

_INIT: Final = 1
_TRIES: Final = 100
_SHARED_MEMORY_BYTES: Final = 64 << 20
"""Of System V segments in one sandbox, at most."""


class Boots:
    """Made once, while the launcher still sees the host: `layers_folder` is a descriptor or -1, `ids_folder` and
    `own_pids` are those of `IdBlocks` and the launcher's own pid namespace."""

    def __init__(
        self,
        settings: Settings,
        host: rootfs.HostImage,
        groups: Cgroups,
        *,
        layers_folder: int,
        ids_folder: int,
        own_pids: int,
        single_id: bool,
    ) -> None:
        self.groups = groups
        self._settings = settings
        self.max_live = settings.max_live or default_live(groups.allowed)
        self._share = share(groups.allowed, self.max_live, settings.processes, settings.open_files)
        self._host = host
        self._layers_folder = layers_folder
        self._own_pids = own_pids
        self.single_id = single_id
        self._id_maps = IdMaps()
        ranges = IdRanges(IDS_PER_SANDBOX, RANGES_PER_BLOCK, IdBlocks(ids_folder, os.fstat(own_pids).st_ino).claim)
        self._ranges: IdRanges | OneId = OneId() if single_id else ranges
        self.shelf = ImageTable(self.drop_layer, lambda: self._id_map(0, FIRST_ID))
        with open("/proc/sys/kernel/cap_last_cap", encoding="utf-8") as file:
            self._last_capability = int(file.read())
        self._filter = filter_program(os.uname().machine)

    def begin(
        self, sandbox: Record, message: Message, mounts: tuple[rootfs.Mount, ...], source: Record | None
    ) -> Channel:
        """Fork the first process; the boot is over when it says so on the channel. Raises Refused."""
        folders = requests.folders_of(message)
        needed = (str(message["image"]), *(name for name, _ in folders))
        for name in needed:
            if self.shelf.find(name) is None:
                raise Refused("ImageUnknown", f"image {name!r}: the launcher does not have it")
        self._check_room()
        group_limits = self._group_limits(message)
        limits = self._limits(message, group_limits)
        _check_targets((*(mount.target for mount in mounts), *(target for _, target in folders)))
        sandbox.base_id = self._range_for(source)
        sandbox.image, sandbox.folders = needed[0], needed[1:]
        sandbox.limits = {"memory_bytes": group_limits.memory_bytes, "cpus": group_limits.cpus}
        for name in needed:
            self.shelf.take(name)
        try:
            self.groups.create(sandbox.id, group_limits)
            return self._fork(sandbox, self._root(sandbox, folders, mounts, source), limits)
        except OSError as error:
            self.groups.remove(sandbox.id)
            self._ranges.release(sandbox.base_id)
            for name in needed:
                self.shelf.give_back(name)
            raise Refused("BootFailed", reason_of(error)) from error

    def _range_for(self, source: Record | None) -> int:
        """A range of its own, or that of the dead sandbox whose files it shows: owners and modes then mean the same."""
        try:
            return self._ranges.take() if source is None else self._ranges.share(source.base_id)
        except IndexError:
            raise Refused("CapacityExceeded", "no user ids are free on this host: end other launchers") from None

    def _check_room(self) -> None:
        """Raises Refused when the disk, or the memory, that layers lie on is nearly full."""
        if self._layers_folder >= 0:
            status = os.fstatvfs(self._layers_folder)
            free, where = status.f_bavail * status.f_frsize, self._settings.layers_in
        else:
            free, where = _available_memory_bytes(), "memory"
        if free < self._settings.min_free_bytes:
            text = f"{free >> 20} MiB free in {where}: boots wait for min_free_bytes={self._settings.min_free_bytes}"
            raise Refused("OutOfDisk", text)

    def _group_limits(self, message: Message) -> GroupLimits:
        """Raises Refused for a limit that this machine cannot keep; its defaults the launcher keeps where it can."""
        asked = {
            "memory": requests.amount("memory_bytes", message["memory_bytes"]),
            "cpu": requests.amount("cpus", message["cpus"]),
        }
        for controller, value in asked.items():
            if value is not None and controller in self.groups.missing:
                reason = self.groups.missing[controller]
                raise Refused("SpecRefused", f"{controller} limit: {reason}; see headrace doctor")
        most = self.groups.allowed.memory_bytes
        if asked["memory"] is not None:
            _check_ceiling("memory_bytes", asked["memory"], most, "what this host leaves for all sandboxes")
        default = self._settings.memory_bytes
        memory_bytes = asked["memory"] or (None if default is None else min(default, most))
        cpus = asked["cpu"] or self._settings.cpus
        # The kernel refuses absurd numbers, and more than there are is no limit anyway.
        cpus = None if cpus is None else min(cpus, os.cpu_count() or cpus)
        return GroupLimits(
            None if memory_bytes is None else int(memory_bytes),
            None if cpus is None else float(cpus),
            self._processes(message) + RESERVED_PROCESSES + 1,
        )

    def _limits(self, message: Message, groups: GroupLimits) -> Limits:
        """Files and segments lie in memory and no process owns them: what they may take together leaves enough of the
        limit for commands, so that running out of memory kills those and never the first process."""
        asked = requests.amount("disk_bytes", message["disk_bytes"])
        layer_bytes = int(asked or self._settings.layer_bytes)
        shared_bytes = _SHARED_MEMORY_BYTES
        if groups.memory_bytes is not None:
            shared_bytes = min(shared_bytes, groups.memory_bytes // 8)
        if groups.memory_bytes is not None and self._layers_folder < 0:
            room = groups.memory_bytes * 7 // 8 - shared_bytes
            if asked is not None and layer_bytes > room:
                raise Refused("SpecRefused", f"disk_bytes={asked}: files lie in memory, of which {room} may hold them")
            layer_bytes = min(layer_bytes, room)
        return Limits(self._processes(message), self._share.open_files, layer_bytes, shared_bytes, self.single_id)

    def _processes(self, message: Message) -> int:
        asked = requests.amount("pids", message["pids"])
        if asked is not None:
            most = self.groups.allowed.processes - RESERVED_PROCESSES - 1
            _check_ceiling("pids", asked, most, "what this host leaves for all sandboxes (kernel.pid_max)")
        return int(asked or self._share.processes)

    def _fork(self, sandbox: Record, root: rootfs.Root, limits: Limits) -> Channel:
        rootfs.make_layer(sandbox.id)
        try:
            if self._layers_folder < 0:
                rootfs.mount_memory_layer(sandbox.id, sandbox.base_id, limits.layer_bytes)
            return self._fork_first_process(sandbox, root, limits)
        except OSError:
            rootfs.drop_layer(sandbox.id)
            raise

    def _fork_first_process(self, sandbox: Record, root: rootfs.Root, limits: Limits) -> Channel:
        plan = Plan(root, self._host, limits, self._layers_folder, self._last_capability, self._filter)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sandbox.pid = self._fork_apart() if self.single_id else self._fork_into_own_pids()
            if sandbox.pid == 0:
                _become_init(plan, self.groups, theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return Channel(ours)

    def _fork_into_own_pids(self) -> int:
        """Fork into a new pid namespace."""
        syscalls.unshare(syscalls.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                self._return_to_own_pids()
        return pid

    @staticmethod
    def _fork_apart() -> int:
        """The same for those who may not return to the host's pid namespace: by a process in between, which ends, so
        that the first process of the sandbox becomes a child of this one, a subreaper."""
        pid_read, pid_write = os.pipe2(os.O_CLOEXEC)
        between = os.fork()
        if between == 0:
            try:
                syscalls.unshare(syscalls.CLONE_NEWPID)
                pid = os.fork()
                if pid == 0:
                    return 0
                os.write(pid_write, str(pid).encode())
            finally:
                if os.getpid() != _INIT:
                    os._exit(0)
        os.close(pid_write)
        try:
            text = os.read(pid_read, 32)
        finally:
            os.close(pid_read)
            os.waitpid(between, 0)
        if not text:
            raise OSError(0, "no process could be forked into a new pid namespace")
        return int(text)

    def _return_to_own_pids(self) -> None:
        """Only children enter a new pid namespace; ours is the one for the children to come. A launcher that cannot
        have it back can boot nothing any more: it ends, and its sandboxes with it."""
        for _ in range(_TRIES):
            with suppress(OSError):
                syscalls.join_namespace(self._own_pids, syscalls.CLONE_NEWPID)
                return
        os._exit(1)

    def _root(
        self,
        sandbox: Record,
        folders: tuple[tuple[str, str], ...],
        mounts: tuple[rootfs.Mount, ...],
        source: Record | None,
    ) -> rootfs.Root:
        image = self.image_of(sandbox)
        source_image = rootfs.HOST if source is None else self.image_of(source)
        maps = [
            tuple(self._id_map(layer.base_id, sandbox.base_id) for layer in shown.layers)
            for shown in (image, source_image)
        ]
        shown = tuple(self._folder(name, target, sandbox.base_id) for name, target in folders)
        single = self.single_id
        return rootfs.Root(sandbox.id, sandbox.base_id, single, image, maps[0], shown, mounts, source_image, maps[1])

    def _folder(self, name: str, target: str, base_id: int) -> rootfs.Folder:
        held = self.shelf.find(name)
        assert held is not None
        return rootfs.Folder(held.layers[0], self._id_map(held.layers[0].base_id, base_id), target)

    def _id_map(self, stored: int, shown: int) -> int:
        return -1 if self.single_id else self._id_maps.get(stored, shown)

    def image_of(self, sandbox: Record) -> rootfs.Image:
        image = self.shelf.find(sandbox.image)
        assert image is not None
        return image

    def drop_layer(self, sandbox_id: str, base_id: int) -> None:
        """Of a dead sandbox, or of a snapshot that nobody needs."""
        rootfs.drop_layer(sandbox_id)
        self._ranges.release(base_id)


def _check_targets(targets: tuple[str, ...]) -> None:
    for target in targets:
        try:
            rootfs.check_target(target)
        except rootfs.MountRefused as error:
            raise Refused("SpecRefused", str(error)) from error


def _check_ceiling(name: str, asked: float, most: int, why: str) -> None:
    """Refuse for good what no waiting makes possible."""
    if asked > most:
        raise Refused("SpecRefused", f"{name}={asked:.0f} is above the ceiling {most}, {why}; ask for less")


def _available_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="utf-8") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


def _become_init(plan: Plan, groups: Cgroups, control: socket.socket) -> NoReturn:
    """In the forked child: join the sandbox's groups, let go of everything of the launcher's, then be the sandbox's
    first process."""
    try:
        groups.join(plan.root.sandbox_id)
        commands_group = groups.open_commands(plan.root.sandbox_id)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kept = os.dup(control.fileno())
        first = 3
        needed = {kept, commands_group, plan.layers_folder, *plan.root.all_id_maps}
        for descriptor in sorted(needed - {-1}):
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, 1 << 20)
        run_init(plan, socket.socket(fileno=kept), commands_group)
    finally:
        os._exit(1)
