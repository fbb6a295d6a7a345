"""A setting of the C library's allocator for processes that handle bodies of megabytes.

Invariant: a block of `LEAST_BYTES` or more goes back to the system when it is freed. Otherwise the library keeps such
blocks once it has seen one (mallopt(3), M_MMAP_THRESHOLD), and small ones that are left between them keep hundreds of
megabytes.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

LEAST_BYTES: Final = 1 << 20
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3


def return_large_blocks() -> None:
    """Apply the setting to this process. Other C libraries than glibc have none."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, LEAST_BYTES)
        mallopt(_TRIM_THRESHOLD, LEAST_BYTES)
