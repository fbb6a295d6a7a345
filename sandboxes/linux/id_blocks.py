"""Blocks of this host's user ids that launchers claim and divide into ranges, one for each sandbox.

The kernel counts some resources by user id, so separate ids let it count them for each sandbox.

Invariants: a block belongs to the process that holds the lock on its file; the kernel releases the lock when that
process dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Final

FIRST_ID: Final = 100_000
IDS_PER_SANDBOX: Final = 65536
RANGES_PER_BLOCK: Final = 64
BLOCKS: Final = 380
"""Ids up to 1.6 billion."""


class IdBlocks:
    """Blocks that this process has claimed. `folder` is a descriptor of the folder in which all launchers of the host
    lock their blocks. `start` is the first block to try: containers with their own /tmp do not share that folder,
    although the same kernel counts their processes, so each container starts at a different block."""

    def __init__(self, folder: int, start: int) -> None:
        self._folder = folder
        self._start = start
        self._tried = 0

    def claim(self) -> int:
        """Claim a free block and return its first id. Raises IndexError if none is left."""
        for tried in range(self._tried, BLOCKS):
            number = (self._start + tried) % BLOCKS
            file = os.open(str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            # The open descriptor is the claim, so it stays open as long as this process lives.
            self._tried = tried + 1
            return FIRST_ID + number * RANGES_PER_BLOCK * IDS_PER_SANDBOX
        raise IndexError("no block of user ids is free")


class OneId:
    """Replacement for `IdRanges` without root, where all sandboxes share the only id."""

    def take(self) -> int:
        return 0

    def share(self, base: int) -> int:
        return base

    def release(self, base: int) -> None:
        """Do nothing: the id is shared and needs no release."""


class IdRanges:
    """Allocator of ranges of `size` host ids; a range may have several holders. `claim()` returns the first id of a new
    block that holds `block` ranges, or raises IndexError. Claimed blocks are kept."""

    def __init__(self, size: int, block: int, claim: Callable[[], int]) -> None:
        self._size = size
        self._block = block
        self._claim = claim
        self._free: list[int] = []
        self._holders: dict[int, int] = {}

    def take(self) -> int:
        """Return the first id of a free range. Raises IndexError if none is left."""
        if not self._free:
            first = self._claim()
            self._free = [first + self._size * index for index in reversed(range(self._block))]
        base = self._free.pop()
        self._holders[base] = 1
        return base

    def share(self, base: int) -> int:
        self._holders[base] += 1
        return base

    def release(self, base: int) -> None:
        self._holders[base] -= 1
        if self._holders[base] == 0:
            del self._holders[base]
            self._free.append(base)
