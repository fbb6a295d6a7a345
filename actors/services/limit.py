"""Adaptive limit on concurrent calls to a service: additive increase, multiplicative decrease.

Invariants:
- The limit is at least `least` and at most `most`, and begins there.
- An overload halves the limit, once for all calls that were in progress at that moment: they met the same overload.
- The limit grows by one after as many successes as it allows calls, and only while it is what holds calls back.
- Calls get their slots in the order in which they asked.

The rule is that of D. Chiu and R. Jain, Computer Networks and ISDN Systems 17(1), 1989.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

DECREASE: Final = 0.5
"""Factor by which an overload lowers the limit."""


class CallLimit:
    """The limit and the number of calls in progress. Pure: `now` is an argument, in seconds of one monotonic clock."""

    def __init__(self, *, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.in_use = 0
        self._limit = float(most)
        self._successes = 0
        self._decreased_s = float("-inf")

    @property
    def limit(self) -> int:
        """Number of calls that may be in progress at once."""
        return int(self._limit)

    @property
    def has_room(self) -> bool:
        """True if another call may begin. After a decrease there may be more calls in progress than the limit."""
        return self.in_use < self.limit

    def begin(self) -> None:
        """Record the start of a call."""
        self.in_use += 1

    def end(self) -> None:
        """Record the end of a call, whatever its result."""
        self.in_use -= 1

    def succeeded(self) -> None:
        """Record a success, before the end of its call."""
        if self.has_room:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self._limit = min(float(self.most), self._limit + 1.0)

    def overloaded(self, began_s: float, now: float) -> None:
        """Record that the service was too slow for a request that began at `began_s`, or answered that it is
        overloaded."""
        if began_s < self._decreased_s:
            return
        self._limit = max(float(self.least), self._limit * DECREASE)
        self._successes, self._decreased_s = 0, now


class Slots:
    """Slots for calls under an adaptive limit."""

    def __init__(self, limit: CallLimit) -> None:
        self._limit = limit
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot."""
        return len(self._queue)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot for the block, after waiting for it."""
        if self._queue or not self._limit.has_room:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    # Absent if a call that ended since has passed over it.
                    with suppress(ValueError):
                        self._queue.remove(turn)
                else:
                    # The slot had been given already when the caller was cancelled.
                    self._give_back()
                raise
        else:
            self._limit.begin()
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._limit.end()
        # A loop, since the limit may have grown by more than this one call.
        while self._queue and self._limit.has_room:
            turn = self._queue.popleft()
            if not turn.cancelled():
                self._limit.begin()
                turn.set_result(None)
