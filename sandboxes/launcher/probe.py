# ruff: noqa: PTH102, PTH106, PTH112, PTH120, PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Probe of this machine's kernel, which tries each isolation feature in a forked child with only the standard library.

Invariants: nothing outlives a child. The host is not changed, except that the processes in a control group that is ours
are moved into a leaf of it, as the launcher would do (`cgroup_placement`). Each check runs in its own process, so a
check that the kernel refuses does not affect the others. The output is one line of JSON: `reasons` (an empty string for
a feature that is present, otherwise the kernel's reason), `host` and `allowed` (`host_limits`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Final

from headrace.sandboxes.launcher import init
from headrace.sandboxes.linux import rootfs, seccomp, syscalls
from headrace.sandboxes.linux.cgroups import Cgroups, GroupLimits
from headrace.sandboxes.linux.host_limits import allowed_to_sandboxes, read_host
from headrace.sandboxes.linux.id_blocks import FIRST_ID
from headrace.sandboxes.linux.id_maps import IdMaps
from headrace.sandboxes.linux.syscalls import reason_of

_AF_VSOCK: Final = 40


def main() -> None:
    reasons = {name: _in_child(check) for name, check in CHECKS.items()}
    try:
        groups = Cgroups.of_this_process()
    except OSError:
        allowed = allowed_to_sandboxes(read_host(), None, None)
    else:
        groups.close()
        allowed = groups.allowed
    document = {"reasons": reasons, "host": read_host(), "allowed": allowed}
    os.write(1, json.dumps(document).encode() + b"\n")


def _in_child(check: Callable[[], None]) -> str:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        reason = ""
        try:
            if os.geteuid() != 0 and check is not _id_range:
                syscalls.enter_own_user_namespace()
            check()
        except OSError as error:
            reason = reason_of(error)
        finally:
            os.write(write_end, reason.encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        reason = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return reason if status == 0 else reason or f"the check died with status {status}"


def _own_namespace(flag: int) -> Callable[[], None]:
    return lambda: syscalls.unshare(flag)


def _id_range() -> None:
    """Map a range of ids into a child's user namespace from the outside, as the launcher does."""
    os.close(IdMaps().get(0, FIRST_ID))


def _private_root(then: Callable[[int], None] = lambda _mount: None, source: str = "") -> None:
    """Build the launcher's own root (tmpfs, read-only binds by mount_setattr, devices, pivot_root), then call `then`
    with a mount of the host's folder `source`, or -1 without one."""
    folder = tempfile.mkdtemp(prefix="headrace-probe-")

    def build() -> None:
        mount = syscalls.copy_mount(source) if source else -1
        rootfs.build_launcher_root(folder, single_id=os.geteuid() != 0)
        then(mount)

    try:
        reason = _in_child(build)
    finally:
        os.rmdir(folder)
    if reason:
        raise OSError(0, reason)


def _openat2() -> None:
    root = os.open("/", os.O_PATH)
    os.close(syscalls.open_resolved(root, "proc", os.O_PATH, syscalls.RESOLVE_IN_ROOT))


def _drop() -> None:
    with open("/proc/sys/kernel/cap_last_cap", encoding="utf-8") as file:
        last = int(file.read())
    syscalls.drop_capabilities(init.KEPT_CAPABILITIES, last)


def _call_filter() -> None:
    program = seccomp.filter_program(os.uname().machine)
    if program is None:
        raise OSError(0, f"there is no system call filter for {os.uname().machine}")
    syscalls.forbid_new_privileges()
    syscalls.filter_calls(program)
    try:
        socket.socket(_AF_VSOCK, socket.SOCK_STREAM).close()
    except OSError:
        return
    raise OSError(0, "the system call filter allowed a vsock")


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _images() -> None:
    """Mount an overlay whose lower layer is the folder of the image store, or what exists of its path, with other
    ids."""
    # After the two arguments of `stdlib_process`.
    source = sys.argv[3] if len(sys.argv) > 3 else "/"
    while not os.path.isdir(source):
        source = os.path.dirname(source)
    _private_root(_mount_mapped_overlay, source)


def _snapshots() -> None:
    """The same with a folder in memory, where layers of sandboxes are unless `layers_in` is set."""
    _private_root(_mount_mapped_overlay)


def _mount_mapped_overlay(mount: int) -> None:
    os.mkdir("/layers/probe", 0o755)
    syscalls.mount("tmpfs", "/layers/probe", "tmpfs")
    for name in ("upper", "work", "root"):
        os.mkdir(f"/layers/probe/{name}")
    lower = mount if mount >= 0 else syscalls.copy_mount("/images")
    syscalls.map_mount_ids(lower, IdMaps().get(0, FIRST_ID))
    syscalls.attach_mount(lower, "/lower/0")
    layer = "/layers/probe"
    options = f"lowerdir=/lower/0,upperdir={layer}/upper,workdir={layer}/work,redirect_dir=on"
    syscalls.mount("overlay", "/layers/probe/root", "overlay", 0, options)


def _group(controller: str) -> Callable[[], None]:
    """Return a check that makes a group, sets its limits, joins it and, for `freezer`, pauses and resumes it."""

    def check() -> None:
        groups = Cgroups.of_this_process()
        try:
            if controller in groups.missing:
                raise OSError(0, groups.missing[controller])
            groups.create("probe", GroupLimits(64 << 20, 0.5, 64))
            child = os.fork()
            if child == 0:
                groups.join("probe")
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status != 0:
                raise OSError(0, "a process could not join a group")
            if controller == "freezer":
                groups.set_frozen("probe", frozen=True)
                groups.set_frozen("probe", frozen=False)
        finally:
            groups.remove("probe")
            groups.close()

    return check


CHECKS: Final[dict[str, Callable[[], None]]] = {
    "user namespace": _own_namespace(syscalls.CLONE_NEWUSER),
    "mount namespace": _own_namespace(syscalls.CLONE_NEWNS),
    "pid namespace": _own_namespace(syscalls.CLONE_NEWPID),
    "network namespace": _own_namespace(syscalls.CLONE_NEWNET),
    "ipc namespace": _own_namespace(syscalls.CLONE_NEWIPC),
    "uts namespace": _own_namespace(syscalls.CLONE_NEWUTS),
    "id range": _id_range,
    "private root": _private_root,
    "link-safe paths": _openat2,
    "dropped capabilities": _drop,
    "no new privileges": syscalls.forbid_new_privileges,
    "call filter": _call_filter,
    "images": _images,
    "snapshots": _snapshots,
    "death with the owner": _pidfd,
    **{f"cgroup {controller}": _group(controller) for controller in ("memory", "cpu", "pids", "freezer")},
}
