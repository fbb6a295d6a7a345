# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""User namespaces that map the ids of an image's files to those of a sandbox (mount_setattr(2)).

Invariants: no process runs in them. A namespace is created when a pair of ranges is first used and is then reused, so
that most boots create none. At most `_MAX_OPEN` are open.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from headrace.sandboxes.linux import syscalls
from headrace.sandboxes.linux.id_blocks import IDS_PER_SANDBOX

_MAX_OPEN: Final = 1024


class IdMaps:
    """User namespaces by the first id on disk and the first id to show. This object keeps ownership of the
    descriptors."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], int] = OrderedDict()

    def get(self, stored: int, shown: int) -> int:
        """Return a descriptor of the user namespace. Raises OSError."""
        pair = (stored, shown)
        if pair in self._known:
            self._known.move_to_end(pair)
            return self._known[pair]
        if len(self._known) >= _MAX_OPEN:
            os.close(self._known.popitem(last=False)[1])
        made_read, made_write = os.pipe2(os.O_CLOEXEC)
        done_read, done_write = os.pipe2(os.O_CLOEXEC)
        # A namespace lives as long as a descriptor of it is open: its only process can end at once.
        child = os.fork()
        if child == 0:
            try:
                # The child's copy would keep the pipe open after the parent has closed its end.
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
                    file.write(f"{stored} {shown} {IDS_PER_SANDBOX}")
            descriptor = self._known[pair] = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(made_read)
            os.close(done_write)
            os.waitpid(child, 0)
        return descriptor
