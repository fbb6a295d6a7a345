"""Secrets of the launcher, which none of its children inherits.

Invariants:
- They are stored in one page of memory that the kernel clears in a forked child (MADV_WIPEONFORK, madvise(2)): the
  first process of a sandbox, and code that runs in a fork of it, cannot authenticate to the launcher.
- A sandbox's secret is derived from its id and is stored nowhere.
"""

from __future__ import annotations

import mmap
import os

# hashlib and hmac load OpenSSL, and every sandbox would carry its pages.
from _blake2 import blake2s
from _operator import _compare_digest as compare_digest

_MADV_WIPEONFORK = 18
"""From linux/mman.h; Python names it from 3.13 on."""
_KEY_BYTES, _DIGEST_BYTES = 32, 16


class Secrets:
    """Secrets of one launcher. The admin secret itself is not stored, only its digest."""

    def __init__(self, admin: str) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._page.madvise(_MADV_WIPEONFORK)
        self._page[:_KEY_BYTES] = os.urandom(_KEY_BYTES)
        self._page[_KEY_BYTES : _KEY_BYTES + _DIGEST_BYTES] = self._digest(b"admin " + admin.encode())

    def of(self, sandbox_id: str) -> str:
        """Return the secret of a sandbox."""
        return self._digest(b"sandbox " + sandbox_id.encode()).hex()

    def is_admin(self, given: str) -> bool:
        known = self._page[_KEY_BYTES : _KEY_BYTES + _DIGEST_BYTES]
        return compare_digest(self._digest(b"admin " + given.encode()), known)

    def fits(self, sandbox_id: str, given: str) -> bool:
        return compare_digest(given.encode(), self.of(sandbox_id).encode())

    def _digest(self, data: bytes) -> bytes:
        return blake2s(data, key=self._page[:_KEY_BYTES], digest_size=_DIGEST_BYTES).digest()
