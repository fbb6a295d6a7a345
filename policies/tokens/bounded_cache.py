"""A cache bounded by bytes.

Invariants:
- What was used least recently leaves first; at most `max_bytes` are kept, by the sizes its users state.
- Several threads may use it.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Keys are hashable; values are shared, so nobody changes them."""

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
        """Keep a value of `size` bytes, its key included."""
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
