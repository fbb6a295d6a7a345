# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Wrappers of Linux system calls that Python 3.11 does not have.

Invariants: every wrapper raises an OSError that names the call and its object. The wrappers keep no state. Only the
standard library is imported, because the launcher starts without site-packages.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18

RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_IN_ROOT: Final = 0x10

_MNT_DETACH: Final = 2
_AT_RECURSIVE: Final = 0x8000
_AT_EMPTY_PATH: Final = 0x1000
_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_MOUNT_ATTR_IDMAP: Final = 0x00100000
_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_OPENAT2: Final = 437
_SYS_PIDFD_GETFD: Final = 438
_SYS_MOUNT_SETATTR: Final = 442

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NAME: Final = 15
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2
_SECBIT_NO_SETUID_FIXUP: Final = 4
_CAPABILITY_VERSION_3: Final = 0x20080522


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode())
    _checked(_libc.mount(*arguments), f"mount {kind or 'bind'} on {target}")


def detach(target: str) -> None:
    """Unmount lazily: current users keep the mount, and nobody else can reach it."""
    _checked(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def set_mount_flags(target: str, flags: int) -> None:
    """Add flags such as MS_RDONLY, MS_NOSUID, MS_NODEV and MS_NOEXEC to a mount and all mounts below it (the MOUNT_ATTR
    values are equal)."""
    attributes = _MountAttributes(attr_set=flags)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, -100, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _checked(result, f"mount_setattr {target}")


def copy_mount(path: str) -> int:
    """Return a descriptor of a detached copy of a mount, which may be passed to another mount namespace
    (open_tree(2))."""
    result = _libc.syscall(_SYS_OPEN_TREE, -100, path.encode(), _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC)
    return _checked(result, f"open_tree {path}")


def attach_mount(descriptor: int, target: str) -> None:
    """Attach a mount made by `copy_mount` at `target` (move_mount(2))."""
    result = _libc.syscall(_SYS_MOVE_MOUNT, descriptor, b"", -100, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _checked(result, f"move_mount {target}")


def map_mount_ids(descriptor: int, user_namespace: int) -> None:
    """Show the files of a detached mount with their ids mapped by a user namespace."""
    attributes = _MountAttributes(attr_set=_MOUNT_ATTR_IDMAP, userns_fd=user_namespace)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, descriptor, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    _checked(result, "mount_setattr idmap")


def pivot_into(root: str) -> None:
    """Make the mount point `root` the root of this mount namespace and detach the old one."""
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), f"pivot_root {root}")
    detach(".")
    os.chdir("/")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def enter_own_user_namespace() -> None:
    """Become root of a new user namespace whose only id is that of this process; does not need root
    (user_namespaces(7))."""
    user_id, group_id = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user_id} 1"), ("gid_map", f"0 {group_id} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def join_namespace(descriptor: int, flags: int) -> None:
    _checked(_libc.setns(descriptor, flags), f"setns {flags:#x}")


def open_resolved(directory: int, path: str, flags: int, resolve: int) -> int:
    """Open `path` below `directory` under RESOLVE_* restrictions (openat2(2)) and return the descriptor."""
    how = _OpenHow(flags=flags | os.O_CLOEXEC, mode=0, resolve=resolve)
    result = _libc.syscall(_SYS_OPENAT2, directory, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    return _checked(result, f"open {path}")


def duplicate_of(process: int, number: int) -> int:
    """Return a copy of the descriptor `number` of a process, given as a pidfd (pidfd_getfd(2)). The caller needs the
    right to trace it."""
    return _checked(_libc.syscall(_SYS_PIDFD_GETFD, process, number, 0), f"pidfd_getfd {number}")


def _prctl(option: int, argument: object, what: str) -> None:
    _checked(_libc.prctl(option, argument, 0, 0, 0), what)


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel to send `signal_number` when the parent thread dies. A later change of credentials cancels
    this."""
    _prctl(_PR_SET_PDEATHSIG, signal_number, "PR_SET_PDEATHSIG")


def forbid_inspection() -> None:
    """Prevent other processes from tracing this one or reading its memory, descriptors or environment; forked children
    inherit this."""
    _prctl(_PR_SET_DUMPABLE, 0, "PR_SET_DUMPABLE")


def allow_inspection() -> None:
    """Allow processes of the same user to inspect this one, and this process to open its own files in /proc."""
    _prctl(_PR_SET_DUMPABLE, 1, "PR_SET_DUMPABLE")


def become_subreaper() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def forbid_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter of 8-byte instructions for this process and all its children; needs no_new_privs."""
    argument = _FilterProgram(len(program) // 8, program)
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(argument), 0, 0), "PR_SET_SECCOMP")


def keep_capabilities_as(user_id: int) -> None:
    """Change the real and effective user but keep all capabilities until the next user namespace or execve."""
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, "PR_SET_SECUREBITS")
    os.setresuid(user_id, user_id, 0)


def name_process(name: str) -> None:
    """Replace this process's name and command line, which every process in a sandbox can read, with `name`."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), "PR_SET_NAME")
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    # proc(5): arg_start and arg_end are fields 48 and 49; the split begins at field 3.
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, name.encode().ljust(end - start, b"\0"), end - start)


def drop_capabilities(keep: Collection[int], last: int) -> None:
    """Keep only the capabilities `keep` in the bounding, permitted and effective sets; `last` is the kernel's highest
    one."""
    for capability in range(last + 1):
        if capability not in keep:
            _prctl(_PR_CAPBSET_DROP, capability, f"PR_CAPBSET_DROP {capability}")
    mask = sum(1 << capability for capability in keep)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    sets = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    _checked(_libc.capset(header, sets), "capset")


def create_files_as(user_id: int, group_id: int) -> None:
    """Set the owner ids of files that this process creates (setfsuid, setfsgid)."""
    _libc.setfsgid(group_id)
    _libc.setfsuid(user_id)


def reason_of(error: OSError) -> str:
    """Describe why the kernel refused a call: `EBUSY: /sys/fs/cgroup/x: Device or resource busy`."""
    name = errno.errorcode.get(error.errno or 0, "")
    where = "" if error.filename is None else str(error.filename)
    return ": ".join(part for part in (name, where, error.strerror or str(error)) if part)
