# ruff: noqa: PTH102, PTH110, PTH116, PTH119, PTH120, PTH123
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""Choice of the version 2 group below which a launcher makes its own.

Invariants:
- A group with controllers switched on for its children may hold no process itself ("no internal processes",
  cgroup-v2.rst). Where the group around the launcher is ours, its processes move into a leaf first: then the groups of
  sandboxes lie below it, and its limits and its end reach them.
- It is ours as the root of a cgroup namespace (a container), as a unit that systemd delegated, or as a folder of the
  user when all processes in it are that user's too. Processes of a host's real root are never moved.
- Of a group that is not ours nothing is moved: the group above is tried instead, as it is.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Final, NamedTuple

from headrace.sandboxes.kernel.reasons import reason_of

LEAF: Final = "headrace-processes"
_ROUNDS: Final = 100
_NO_PROCESS: Final = 0
"""How cgroup.procs shows a process of another pid namespace."""


class Place(NamedTuple):
    folder: str
    controllers: frozenset[str]
    """Switched on for the groups below."""
    reasons: dict[str, str]
    """Why a controller is not."""


def place(own: str, wanted: frozenset[str]) -> Place:
    """The best group for the launcher's. `own` is the folder of the group that this process is in."""
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
    return _is_namespace_root(folder) or _is_delegated(folder) or _is_of_this_user(folder)


def _is_namespace_root(folder: str) -> bool:
    """In a container the mount begins at the container's own group, and no group above is seen."""
    return not os.path.exists(f"{os.path.dirname(folder)}/cgroup.controllers")


def _is_delegated(folder: str) -> bool:
    """systemd marks what it delegated (systemd.resource-control(5), Delegate=); `trusted` is for root to read."""
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False


def _is_of_this_user(folder: str) -> bool:
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
        reasons[name] = f"ENOENT: {folder}/cgroup.controllers: it does not list {name}, so nobody delegated it"
    return Place(folder, had, {name: reason for name, reason in reasons.items() if name not in had})


def _switch_on(folder: str, controllers: frozenset[str], *, is_ours: bool) -> None:
    path = f"{folder}/cgroup.subtree_control"
    if controllers <= frozenset(_read(path).split()):
        return
    for _ in range(_ROUNDS):
        if is_ours:
            _move_processes(folder)
        try:
            # In one write: cpu or pids alone are allowed beside processes, but make groups below that can hold none
            # ("domain invalid", cgroup-v2.rst).
            _write(path, " ".join(f"+{name}" for name in sorted(controllers)))
        except OSError as error:
            # Processes are in it, perhaps forked since the look.
            if error.errno != errno.EBUSY or not is_ours:
                raise
        else:
            return
    raise OSError(errno.EBUSY, f"{path}: processes keep appearing in this group")


def _move_processes(folder: str) -> None:
    """Into a leaf; they stay there when the launcher ends, for the controllers stay on."""
    pids = _processes(folder)
    if _NO_PROCESS in pids:
        text = "processes of another pid namespace are in this group; start headrace in a group of its own"
        raise OSError(errno.EBUSY, f"{folder}/cgroup.procs: {text}")
    if not pids:
        return
    with suppress(FileExistsError):
        os.mkdir(f"{folder}/{LEAF}", 0o755)
    for pid in pids:
        # It may have ended meanwhile.
        with suppress(ProcessLookupError):
            _write(f"{folder}/{LEAF}/cgroup.procs", str(pid))


def _processes(folder: str) -> list[int]:
    return [int(line) for line in _read(f"{folder}/cgroup.procs").splitlines()]


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    """The kernel's refusal comes with the write, not with the open, and would name no path."""
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
