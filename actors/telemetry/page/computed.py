"""Values that are read from files in threads, at most one reading of each at a time.

Invariants:
- The event loop never waits for a disk: readings run in an executor that the owner bounds.
- However many clients ask, and however slow they are, one reading of a value is in progress, and none waits behind it.
- A value is read again only when somebody asks for it, at the earliest after `LEAST_S` and after `REST` times the time
  of its last reading, and only if the files that it comes from have changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

LEAST_S: Final = 1.0
REST: Final = 9.0
"""Readings of one value take at most a tenth of one processor."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A value, and when it was read (Unix time)."""

    value: T
    at_s: float


class Busy(Exception):
    """Too many readings are in progress; ask again."""


class Computed(Generic[T]):
    """A value that `read` reads. `mark` returns something that changes when the value may have changed; both run in
    the executor."""

    def __init__(self, executor: Executor, read: Callable[[], T], mark: Callable[[], Hashable]) -> None:
        self._executor, self._read, self._mark = executor, read, mark
        self._running: Future[None] | None = None
        self._seen: Hashable = None
        self._due_s = 0.0
        self._result: Reading[T] | None = None
        self._error: Exception | None = None

    async def get(self, wait_s: float | None = None) -> Reading[T] | None:
        """Return the value, read again if it is due, or an older one if that takes longer than `wait_s` (None: wait for
        it). None if there is no value yet. Raises what the last reading raised."""
        if not self.is_busy and time.monotonic() >= self._due_s:
            self._running = self._executor.submit(self._run)
        if self._running is not None and not self._running.done():
            # Nobody who stops waiting ends the reading: others wait for it.
            await asyncio.wait([asyncio.wrap_future(self._running)], timeout=wait_s)
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def is_busy(self) -> bool:
        """True while a reading is in progress."""
        return self._running is not None and not self._running.done()

    async def now(self) -> T:
        """Return the value, waiting for the first reading."""
        reading = await self.get()
        assert reading is not None
        return reading.value

    def _run(self) -> None:
        begun_s = time.monotonic()
        try:
            mark = self._mark()
            if self._result is None or mark != self._seen:
                self._result = Reading(self._read(), time.time())
            self._seen, self._error = mark, None
        except Exception as error:  # noqa: BLE001 - raised by those who ask
            self._error = error.with_traceback(None)
        ended_s = time.monotonic()
        self._due_s = ended_s + max(LEAST_S, REST * (ended_s - begun_s))


class ComputedByKey(Generic[T]):
    """The values of the last `kept` keys that were asked for, of which at most `busy` are read at the same time."""

    def __init__(self, make: Callable[[str], Computed[T]], *, kept: int, busy: int) -> None:
        assert kept > busy
        self._make, self._kept, self._busy = make, kept, busy
        self._values: dict[str, Computed[T]] = {}

    def of(self, key: str) -> Computed[T]:
        """Return the value of a key. Raises Busy."""
        value = self._values.pop(key, None)
        if value is None:
            if sum(each.is_busy for each in self._values.values()) >= self._busy:
                raise Busy
            value = self._make(key)
        self._values[key] = value
        if len(self._values) > self._kept:
            # The oldest one that nobody waits for: what is being read stays bounded.
            del self._values[next(name for name, each in self._values.items() if not each.is_busy)]
        return value
