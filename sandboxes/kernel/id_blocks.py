"""User ids of this host, in blocks that launchers claim: what the kernel counts by user id is then counted for one
sandbox, not for those of another launcher too.

Invariants: a block belongs to the process that holds the lock of its file; the kernel drops it when that process dies.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

FIRST_ID: Final = 100_000
IDS_PER_SANDBOX: Final = 65536
RANGES_PER_BLOCK: Final = 64
BLOCKS: Final = 380
"""Up to 1.6 billion; the ranges of runc and runsc lie above."""


class IdBlocks:
    """`folder` is a descriptor of the folder where the launchers meet. `start` says at which block to begin: containers
    with a /tmp of their own do not meet, though one kernel counts their processes. Each begins elsewhere."""

    def __init__(self, folder: int, start: int) -> None:
        self._folder = folder
        self._start = start
        self._tried = 0

    def claim(self) -> int:
        """The first id of a block that nobody has. Raises IndexError when none is left."""
        for tried in range(self._tried, BLOCKS):
            number = (self._start + tried) % BLOCKS
            file = os.open(str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            # The descriptor stays open as long as this process lives: it is the claim.
            self._tried = tried + 1
            return FIRST_ID + number * RANGES_PER_BLOCK * IDS_PER_SANDBOX
        raise IndexError("no block of user ids is free")
