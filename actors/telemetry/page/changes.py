"""Changes of a run's files as numbered events.

Invariants:
- A number is the Unix time in milliseconds at which a change was noticed, so numbers grow over restarts, too.
- However many clients wait, the files are looked at once a second.
- Nobody waits beyond `close`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Final

from headrace.actors.runtime.actors.event_stream import POLL_S

LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """Something in the run's files has changed."""

    number: int


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes after a number: at most one, since a view is read as a whole."""

    events: tuple[Change, ...]
    ended: bool


class ChangeWatch:
    """Watch over what `mark` returns."""

    def __init__(self, mark: Callable[[], Awaitable[Hashable]]) -> None:
        self._mark = mark
        self._seen: Hashable = None
        self._number = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End all waits."""
        self._closing.set()

    async def number(self) -> int:
        """Return the number of the newest change."""
        mark = await self._mark()
        if mark != self._seen:
            self._seen, self._number = mark, max(self._number + 1, int(time.time() * 1000))
        return self._number

    async def after(self, number: int, is_gone: Callable[[], bool] = lambda: False) -> Changes:
        """Return the newest change after a number; none if nothing changes for `POLL_S`. The answer is the last one if
        `is_gone` says so, which is asked as often as the files are looked at."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + POLL_S
        while not (self._closing.is_set() or is_gone()) and loop.time() < until_s:
            if (newest := await self.number()) > number:
                return Changes((Change(newest),), ended=False)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._closing.wait()
            except TimeoutError:
                continue
        return Changes((), ended=self._closing.is_set() or is_gone())
