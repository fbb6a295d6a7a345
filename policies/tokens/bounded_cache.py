"""Cache with a bounded size in bytes.

Invariants:
- Its values have at most `max_bytes`, by the sizes that callers pass; the least recently used are evicted first.
- Several threads may use it.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Least-recently-used cache. Values are shared and must not be changed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Key) -> Value | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Store a value; `size` is in bytes and includes the key."""
        with self._lock:
            if key in self._kept or size > self._max_bytes:
                return
            self._kept[key] = value, size
            self._bytes += size
            while self._bytes > self._max_bytes:
                self._bytes -= self._kept.popitem(last=False)[1][1]

    @property
    def bytes_kept(self) -> int:
        return self._bytes
