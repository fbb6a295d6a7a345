# ruff: noqa: PTH123, PTH208
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Processes of one sandbox, as seen by its init, and termination of a command's whole process tree.

Invariants:
- Text that a process can choose for itself (above all, its name) is skipped, never interpreted.
- A tree is stopped before it is killed, so that nothing in it can fork between a scan and a kill.
- A command's shell is a child subreaper: a daemon detached with setsid and a double fork is still its descendant. A
  process that escaped anyway is a child of init and younger than the command; it is killed too, unless another command
  is running.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

_INIT: Final = 1
_MAX_ROUNDS: Final = 8
_DEATHS_S: Final = 1.0
"""Longest wait for killed processes, one of which may hang in a call to the kernel."""


class ProcessEntry(NamedTuple):
    """Parent, state, threads and start time of a process."""

    parent: int
    state: str
    threads: int
    started: int
    """Start time in clock ticks since boot."""

    @property
    def is_alive(self) -> bool:
        """False once all threads have ended; the first alone may be a zombie."""
        return self.state not in "ZX" or self.threads > 1


def parse_stat(text: str) -> ProcessEntry:
    """Parse a line of /proc/<pid>/stat, whose second field is free text in parentheses (proc(5))."""
    fields = text.rpartition(")")[2].split()
    return ProcessEntry(parent=int(fields[1]), state=fields[0], threads=int(fields[17]), started=int(fields[19]))


def read_processes() -> dict[int, ProcessEntry]:
    """Return all processes of this pid namespace except init."""
    entries: dict[int, ProcessEntry] = {}
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in pids:
        with (
            suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat,
        ):
            entries[pid] = parse_stat(stat.read())
    entries.pop(_INIT, None)
    return entries


def tree_of(root: int, entries: Mapping[int, ProcessEntry], *, strays: bool) -> set[int]:
    """Return `root` and its living descendants; with `strays`, also the children of init that are not older than
    `root`, and their descendants."""
    roots = {root} & entries.keys()
    if strays and root in entries:
        born = entries[root].started
        roots |= {pid for pid, entry in entries.items() if entry.parent == _INIT and entry.started >= born}
    children: dict[int, list[int]] = {}
    for pid, entry in entries.items():
        children.setdefault(entry.parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return {pid for pid in found if entries[pid].is_alive}


def kill_tree(root: int, *, strays: bool) -> bool:
    """Stop and then kill a command and all its descendants, and wait until they have ended. Returns False if new
    processes kept appearing; the caller must then kill all processes."""
    stopped: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        fresh = tree_of(root, read_processes(), strays=strays) - stopped
        if not fresh:
            break
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
        stopped |= fresh
    else:
        return False
    ends = select.poll()
    watched: list[int] = []
    for pid in stopped:
        with suppress(OSError):
            watched.append(os.pidfd_open(pid))
            ends.register(watched[-1], select.POLLIN)
        _signal(pid, signal.SIGKILL)
    # A killed process runs once more to end, and a busy machine lets it wait for that.
    until_s = time.monotonic() + _DEATHS_S
    alive = set(watched)
    while alive and (left_s := until_s - time.monotonic()) > 0:
        for descriptor, _ in ends.poll(left_s * 1000):
            ends.unregister(descriptor)
            alive.discard(descriptor)
    for descriptor in watched:
        os.close(descriptor)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
