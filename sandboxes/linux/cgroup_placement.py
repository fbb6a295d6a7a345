# ruff: noqa: PTH102, PTH110, PTH116, PTH119, PTH120, PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Choice of the version 2 control group below which a launcher creates its own.

Invariants:
- A group whose children have controllers may hold no process itself ("no internal processes", cgroup-v2.rst). If the
  launcher's group is ours, its processes are first moved into a leaf. The sandboxes' groups are then below it, within
  its limits, and are removed with it.
- A group is ours if it is the root of a cgroup namespace (a container), a unit that systemd delegated, or a folder
  owned by this user in which all processes also belong to that user. Processes of a host's real root are never moved.
- Processes of a group that is not ours are not moved; the group above it is tried instead, unchanged.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Final, NamedTuple

from headrace.sandboxes.linux.syscalls import reason_of

LEAF: Final = "headrace-processes"
_ROUNDS: Final = 100
_NO_PROCESS: Final = 0
"""Pid that cgroup.procs shows for a process in another pid namespace."""


class Place(NamedTuple):
    """The chosen group and its controllers."""

    folder: str
    controllers: frozenset[str]
    """Controllers that are enabled for the groups below this one."""
    reasons: dict[str, str]
    """Maps each controller that is not enabled to the reason."""


def place(own: str, wanted: frozenset[str]) -> Place:
    """Return the best parent for the launcher's group. `own` is the folder of the group that this process is in."""
    base = os.path.dirname(own) if os.path.basename(own) == LEAF else own
    found = _enable(base, wanted, is_ours=_is_ours(base))
    if found.controllers == wanted or _is_ours(base):
        return found
    above = os.path.dirname(base)
    if os.path.exists(f"{above}/cgroup.controllers"):
        other = _enable(above, wanted, is_ours=False)
        if len(other.controllers) > len(found.controllers):
            return other
    return found


def _is_ours(folder: str) -> bool:
    # Only the real root has no type.
    if not os.path.exists(f"{folder}/cgroup.type"):
        return False
    # In a container the mount begins at the container's own group, and no group above it is visible.
    if not os.path.exists(f"{os.path.dirname(folder)}/cgroup.controllers"):
        return True
    # systemd marks delegated units (systemd.resource-control(5), Delegate=); only root can read `trusted`.
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    user = os.geteuid()
    if user == 0 or os.stat(folder).st_uid != user:
        return False
    try:
        return all(os.stat(f"/proc/{pid}").st_uid == user for pid in _processes(folder))
    except OSError:
        return False


def _enable(folder: str, wanted: frozenset[str], *, is_ours: bool) -> Place:
    reasons: dict[str, str] = {}
    try:
        offered = frozenset(_read(f"{folder}/cgroup.controllers").split())
        try:
            _switch_on(folder, wanted & offered, is_ours=is_ours)
        except OSError as error:
            reasons.update(dict.fromkeys(wanted & offered, reason_of(error)))
        had = frozenset(_read(f"{folder}/cgroup.subtree_control").split()) & wanted
    except OSError as error:
        return Place(folder, frozenset(), dict.fromkeys(wanted, reason_of(error)))
    for name in wanted - offered:
        reasons[name] = f"ENOENT: {folder}/cgroup.controllers: {name} is not listed, so it was not delegated"
    return Place(folder, had, {name: reason for name, reason in reasons.items() if name not in had})


def _switch_on(folder: str, controllers: frozenset[str], *, is_ours: bool) -> None:
    path = f"{folder}/cgroup.subtree_control"
    if controllers <= frozenset(_read(path).split()):
        return
    for _ in range(_ROUNDS):
        pids = _processes(folder) if is_ours else []
        if _NO_PROCESS in pids:
            text = "processes of another pid namespace are in this group; start headrace in a group of its own"
            raise OSError(errno.EBUSY, f"{folder}/cgroup.procs: {text}")
        if pids:
            # The processes stay in the leaf when the launcher ends, because the controllers stay enabled.
            with suppress(FileExistsError):
                os.mkdir(f"{folder}/{LEAF}", 0o755)
        for pid in pids:
            # The process may have ended meanwhile.
            with suppress(ProcessLookupError):
                _write(f"{folder}/{LEAF}/cgroup.procs", str(pid))
        try:
            # All in one write: cpu or pids alone are allowed beside processes, but then the groups below can hold no
            # process ("domain invalid", cgroup-v2.rst).
            _write(path, " ".join(f"+{name}" for name in sorted(controllers)))
        except OSError as error:
            # The group has processes, perhaps forked since they were moved.
            if error.errno != errno.EBUSY or not is_ours:
                raise
        else:
            return
    raise OSError(errno.EBUSY, f"{path}: processes keep appearing in this group")


def _processes(folder: str) -> list[int]:
    return [int(line) for line in _read(f"{folder}/cgroup.procs").splitlines()]


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    """Write a control file. The kernel refuses the write rather than the open, and its error would not name the
    path."""
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
