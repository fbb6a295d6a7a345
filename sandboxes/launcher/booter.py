# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Boot of a sandbox, as seen from the launcher: limits, ids, control groups, a layer, and the first process.

Invariants:
- A boot that fails here releases everything before it returns. What a successful boot has acquired is released once,
  when the sandbox is dead.
- The memory that a sandbox may hold outside any process leaves room for its commands within the memory limit.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn

from headrace.sandboxes.launcher import requests
from headrace.sandboxes.launcher.commands import Limits
from headrace.sandboxes.launcher.guest import GuestFiles
from headrace.sandboxes.launcher.init import RESERVED_PROCESSES, Plan, run_init
from headrace.sandboxes.launcher.requests import FOLDER
from headrace.sandboxes.launcher.sandbox_record import RequestRefused, SandboxRecord, Settings
from headrace.sandboxes.launcher.wire import Channel, Message
from headrace.sandboxes.linux import rootfs, syscalls
from headrace.sandboxes.linux.cgroups import Cgroups, GroupLimits
from headrace.sandboxes.linux.host_limits import default_live, memory_info, share
from headrace.sandboxes.linux.id_blocks import FIRST_ID, IDS_PER_SANDBOX, RANGES_PER_BLOCK, IdBlocks, IdRanges, OneId
from headrace.sandboxes.linux.id_maps import IdMaps
from headrace.sandboxes.linux.rootfs import HOST, Image, Layer
from headrace.sandboxes.linux.seccomp import filter_program
from headrace.sandboxes.linux.syscalls import reason_of

# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)


_INIT: Final = 1
_TRIES: Final = 100
_SHARED_MEMORY_BYTES: Final = 64 << 20
"""Upper bound on the System V segments of one sandbox."""
_TOTAL: Final = "the total that this host allows for all sandboxes"
HOST_NAME: Final = "host"


class Booter:
    """Boots sandboxes; created once, while the launcher can still see the host's files. `layers_folder` is a descriptor
    or -1, `ids_folder` is the descriptor for `IdBlocks`, and `own_pids` is the launcher's own pid namespace."""

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
        counted = "pids" not in groups.missing
        self._share = share(groups.allowed, self.max_live, settings.pids, settings.open_files, counted=counted)
        self._host = host
        self._layers_folder = layers_folder
        self._own_pids = own_pids
        self.single_id = single_id
        self._id_maps = IdMaps()
        ranges = IdRanges(IDS_PER_SANDBOX, RANGES_PER_BLOCK, IdBlocks(ids_folder, os.fstat(own_pids).st_ino).claim)
        self._ranges: IdRanges | OneId = OneId() if single_id else ranges
        self.images = ImageTable(self.drop_layer, lambda: self._id_map(0, FIRST_ID))
        with open("/proc/sys/kernel/cap_last_cap", encoding="utf-8") as file:
            self._last_capability = int(file.read())
        self._filter = filter_program(os.uname().machine)

    def begin(
        self, sandbox: SandboxRecord, message: Message, mounts: tuple[rootfs.Mount, ...], source: SandboxRecord | None
    ) -> Channel:
        """Fork the first process, which reports the outcome of the boot on the returned channel. Raises
        RequestRefused."""
        folders = requests.folders_of(message)
        needed = (str(message["image"]), *(name for name, _ in folders))
        for name in needed:
            if self.images.find(name) is None:
                raise RequestRefused("ImageUnknown", f"image {name!r} is not known to the launcher")
        if self._layers_folder >= 0:
            status = os.fstatvfs(self._layers_folder)
            free, where = status.f_bavail * status.f_frsize, self._settings.layers_in
        else:
            free, where = memory_info("MemAvailable"), "memory"
        if free < self._settings.min_free_bytes:
            least = self._settings.min_free_bytes
            raise RequestRefused("OutOfDisk", f"only {free >> 20} MiB free in {where}: min_free_bytes is {least}")
        group_limits = self._group_limits(message)
        limits = self._limits(message, group_limits)
        guest = requests.guest_of(message)
        for target in (*(mount.target for mount in mounts), *(target for _, target in folders)):
            try:
                rootfs.check_target(target)
            except rootfs.MountRefused as error:
                raise RequestRefused("SpecRefused", str(error)) from error
        try:
            # Files of a frozen sandbox are shown with its own range of ids: owners and modes then mean the same.
            sandbox.base_id = self._ranges.take() if source is None else self._ranges.share(source.base_id)
        except IndexError:
            text = "no user ids are free on this host: stop other launchers"
            raise RequestRefused("CapacityExceeded", text) from None
        sandbox.image, sandbox.folders = needed[0], needed[1:]
        sandbox.limits = {"memory_bytes": group_limits.memory_bytes, "cpus": group_limits.cpus}
        for name in needed:
            self.images.take(name)
        try:
            self.groups.create(sandbox.id, group_limits)
            return self._fork(sandbox, self._root(sandbox, folders, mounts, source, guest), limits, guest)
        except OSError as error:
            self.groups.remove(sandbox.id)
            self._ranges.release(sandbox.base_id)
            for name in needed:
                self.images.release(name)
            raise RequestRefused("BootFailed", reason_of(error)) from error

    def _group_limits(self, message: Message) -> GroupLimits:
        """Return the limits for the sandbox's control groups. Raises RequestRefused for a requested limit that this
        machine cannot enforce; the launcher's default limits are applied only where their controllers exist."""
        asked = {
            "memory": requests.limit("memory_bytes", message["memory_bytes"]),
            "cpu": requests.limit("cpus", message["cpus"]),
        }
        for controller, value in asked.items():
            if value is not None and controller in self.groups.missing:
                reason = self.groups.missing[controller]
                raise RequestRefused("SpecRefused", f"{controller} limit: {reason}; see headrace doctor")
        most = self.groups.allowed.memory_bytes
        if asked["memory"] is not None:
            _check_ceiling("memory_bytes", asked["memory"], most, _TOTAL)
        default = self._settings.memory_bytes
        memory_bytes = asked["memory"] or (None if default is None else min(default, most))
        disk_bytes = requests.limit("disk_bytes", message["disk_bytes"])
        if memory_bytes is not None and disk_bytes is not None and self._layers_folder < 0:
            least = int(disk_bytes + _SHARED_MEMORY_BYTES) * 8 // 7
            if memory_bytes < least:
                # Files are stored in memory. What they are asked to take comes on top of what commands get.
                memory_bytes += least
                _check_ceiling("memory_bytes with disk_bytes, which are stored in memory", memory_bytes, most, _TOTAL)
        cpus = asked["cpu"] or self._settings.cpus
        # The kernel refuses absurd numbers, and a limit above the number of processors has no effect.
        cpus = None if cpus is None else min(cpus, os.cpu_count() or cpus)
        return GroupLimits(
            None if memory_bytes is None else int(memory_bytes),
            None if cpus is None else float(cpus),
            self._processes(message) + RESERVED_PROCESSES + 1,
        )

    def _limits(self, message: Message, groups: GroupLimits) -> Limits:
        """Return the limits that are set inside the sandbox. In-memory files and segments belong to no process. Their
        total leaves enough of the memory limit for commands, so that running out of memory kills commands and never the
        first process."""
        asked = requests.limit("disk_bytes", message["disk_bytes"])
        layer_bytes = int(asked or self._settings.layer_bytes)
        shared_bytes = _SHARED_MEMORY_BYTES
        if groups.memory_bytes is not None:
            shared_bytes = min(shared_bytes, groups.memory_bytes // 8)
        if groups.memory_bytes is not None and self._layers_folder < 0:
            layer_bytes = min(layer_bytes, groups.memory_bytes * 7 // 8 - shared_bytes)
        return Limits(self._processes(message), self._share.open_files, layer_bytes, shared_bytes, self.single_id)

    def _processes(self, message: Message) -> int:
        asked = requests.limit("pids", message["pids"])
        if asked is not None:
            most = self.groups.allowed.processes - RESERVED_PROCESSES - 1
            _check_ceiling("pids", asked, most, f"{_TOTAL} (kernel.pid_max)")
        return int(asked or self._share.processes)

    def _fork(self, sandbox: SandboxRecord, root: rootfs.Root, limits: Limits, guest: GuestFiles | None) -> Channel:
        """Make the layer, fork the first process, and return the channel to it."""
        plan = Plan(
            root,
            self._host,
            limits,
            self._layers_folder,
            self._last_capability,
            self._filter,
            guest,
            sandbox.host_network,
        )
        rootfs.make_layer(sandbox.id)
        try:
            if self._layers_folder < 0:
                rootfs.mount_memory_layer(sandbox.id, sandbox.base_id, limits.layer_bytes)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sandbox.pid = self._fork_by_intermediate() if self.single_id else self._fork_into_new_pids()
                if sandbox.pid == 0:
                    _become_init(plan, self.groups, theirs)
            except OSError:
                ours.close()
                raise
            finally:
                theirs.close()
        except OSError:
            rootfs.drop_layer(sandbox.id)
            raise
        return Channel(ours)

    def _fork_into_new_pids(self) -> int:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        pid = -1
        try:
            return (pid := os.fork())
        finally:
            if pid != 0:
                # Only children enter the new pid namespace; return to our own for later children. A launcher that
                # cannot return can boot nothing any more: it ends, and its sandboxes with it.
                for _ in range(_TRIES):
                    with suppress(OSError):
                        syscalls.join_namespace(self._own_pids, syscalls.CLONE_NEWPID)
                        break
                else:
                    os._exit(1)

    @staticmethod
    def _fork_by_intermediate() -> int:
        """Fork into a new pid namespace through an intermediate process, because without root a process may not return
        to its own namespace. The intermediate process ends, so that the first process of the sandbox becomes a child of
        this subreaper."""
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

    def _root(
        self,
        sandbox: SandboxRecord,
        folders: tuple[tuple[str, str], ...],
        mounts: tuple[rootfs.Mount, ...],
        source: SandboxRecord | None,
        guest: GuestFiles | None,
    ) -> rootfs.Root:
        image = self.image_of(sandbox)
        source_image = rootfs.HOST if source is None else self.image_of(source)
        maps = [
            tuple(self._id_map(layer.base_id, sandbox.base_id) for layer in shown.layers)
            for shown in (image, source_image)
        ]
        shown_folders = []
        for name, target in folders:
            held = self.images.find(name)
            assert held is not None
            layer = held.layers[0]
            shown_folders.append(rootfs.Folder(layer, self._id_map(layer.base_id, sandbox.base_id), target))
        return rootfs.Root(
            sandbox.id,
            sandbox.base_id,
            self.single_id,
            image,
            maps[0],
            tuple(shown_folders),
            mounts,
            source_image,
            maps[1],
            guest is not None,
        )

    def _id_map(self, stored: int, shown: int) -> int:
        return -1 if self.single_id else self._id_maps.get(stored, shown)

    def image_of(self, sandbox: SandboxRecord) -> rootfs.Image:
        """Return the image that a sandbox was booted from."""
        image = self.images.find(sandbox.image)
        assert image is not None
        return image

    def drop_layer(self, sandbox_id: str, base_id: int) -> None:
        """Drop the layer of a dead sandbox, or of a snapshot that is no longer used, and release its ids."""
        rootfs.drop_layer(sandbox_id)
        self._ranges.release(base_id)


def _check_ceiling(name: str, asked: float, most: int, why: str) -> None:
    """Refuse a value that this host can never grant. Raises RequestRefused."""
    if asked > most:
        raise RequestRefused("SpecRefused", f"{name}={asked:.0f} is above the ceiling {most}, {why}; request less")


def _become_init(plan: Plan, groups: Cgroups, control: socket.socket) -> NoReturn:
    """Join the sandbox's groups, close all the launcher's descriptors, and become the sandbox's first process."""
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


class ImageTable:
    """Images by name: the host, images handed over by the launcher's owner, snapshots, and host folders that are
    mounted in sandboxes, each with one layer. An image is kept while a sandbox, even a frozen one, uses it, a layer
    while an image or a sandbox uses it. A snapshot retains its sandbox's layer and ids; nothing is copied.
    `drop_snapshot(sandbox id, base id)` is called when the layer of a snapshot is no longer used. `id_map()` returns
    any user namespace, for a trial mount of a layer."""

    def __init__(self, drop_snapshot: Callable[[str, int], None], id_map: Callable[[], int]) -> None:
        self._drop_snapshot = drop_snapshot
        self._id_map = id_map
        self._images: dict[str, Image] = {HOST_NAME: HOST}
        self._users: dict[str, int] = {}
        self._holders: dict[Layer, int] = {}
        self._snapshots: dict[Layer, str] = {}
        self._last_number = 0

    @property
    def names(self) -> list[str]:
        return [name for name in self._images if name != HOST_NAME and not name.startswith(FOLDER)]

    def find(self, name: str) -> Image | None:
        return self._images.get(name)

    def add(
        self, name: str, mounts: Sequence[int], environment: dict[str, str], folder: str, *, shows_host: bool = False
    ) -> None:
        """Add an image whose layers are host folders, given as detached mounts, topmost first. With `shows_host` they
        are files of sandboxes of the image `host` and need the host's programs. Raises OSError."""
        if name in self._images:
            return
        layers: list[Layer] = []
        try:
            for mount in mounts:
                self._last_number += 1
                layers.append(rootfs.add_layer(self._last_number, mount, self._id_map()))
        except OSError:
            for layer in layers:
                rootfs.drop_image_layer(layer)
            raise
        self._put(name, Image(tuple(layers), shows_host, environment, folder))

    def add_snapshot(self, sandbox_id: str, base_id: int, image: Image) -> str:
        """Add an image that puts a dead sandbox's layer on top of the image it was booted from, and return its name."""
        name = f"snapshot:{sandbox_id}"
        layer = Layer(rootfs.own_layer(sandbox_id, image), base_id)
        self._snapshots[layer] = sandbox_id
        self._put(name, image.above(layer))
        return name

    def _put(self, name: str, image: Image) -> None:
        self._images[name] = image
        for layer in image.layers:
            self._holders[layer] = self._holders.get(layer, 0) + 1

    def take(self, name: str) -> Image:
        """Return an image and count one more sandbox as its user."""
        self._users[name] = self._users.get(name, 0) + 1
        return self._images[name]

    def release(self, name: str) -> None:
        self._users[name] -= 1

    def drop(self, name: str) -> bool:
        """Forget an image. Returns False while sandboxes use it, and for the image `host`; returns True for an unknown
        image."""
        if name == HOST_NAME or self._users.get(name, 0) > 0:
            return False
        image = self._images.pop(name, None)
        self._users.pop(name, None)
        for layer in image.layers if image is not None else ():
            self._holders[layer] -= 1
            if self._holders[layer] == 0:
                del self._holders[layer]
                sandbox_id = self._snapshots.pop(layer, None)
                if sandbox_id is None:
                    rootfs.drop_image_layer(layer)
                else:
                    self._drop_snapshot(sandbox_id, layer.base_id)
        return True
