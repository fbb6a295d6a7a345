# ruff: noqa: PTH123
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""User namespaces that say how the ids of an image's files become those of a sandbox (mount_setattr(2)).

Invariants: no process lives in them; one is made at the first use of a pair of ranges, and ranges are used again, so
that most boots make none; at most `_MAX_KEPT` are held.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from headrace.sandboxes.kernel import syscalls
from headrace.sandboxes.kernel.id_blocks import IDS_PER_SANDBOX

_MAX_KEPT: Final = 1024


class IdMaps:
    """Descriptors by the first id on disk and the first id to show. They stay this object's."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], int] = OrderedDict()

    def get(self, stored: int, shown: int) -> int:
        """Raises OSError."""
        pair = (stored, shown)
        if pair in self._known:
            self._known.move_to_end(pair)
            return self._known[pair]
        if len(self._known) >= _MAX_KEPT:
            os.close(self._known.popitem(last=False)[1])
        descriptor = self._known[pair] = _make(f"{stored} {shown} {IDS_PER_SANDBOX}")
        return descriptor


def _make(id_map: str) -> int:
    """A namespace lives as long as somebody holds it: its first process ends at once."""
    made_read, made_write = os.pipe2(os.O_CLOEXEC)
    done_read, done_write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            # Its own copy would keep the pipe, which the parent closes, open for ever.
            os.close(done_write)
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(made_write, b"m")
            os.read(done_read, 1)
        finally:
            os._exit(0)
    os.close(made_write)
    os.close(done_read)
    try:
        if os.read(made_read, 1) != b"m":
            raise OSError(0, "a user namespace could not be made")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{name}", "w", encoding="utf-8") as file:
                file.write(id_map)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(made_read)
        os.close(done_write)
        os.waitpid(child, 0)
