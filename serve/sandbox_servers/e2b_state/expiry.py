"""Expiry of sandboxes, using one clock for all of them.

Invariant: deadlines are in Unix seconds, because they survive restarts and are shown to clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.sandboxes.launcher.leases import Deadlines


class ExpiryClock:
    """Clock that calls `on_due(name)` at each deadline while `run` is running."""

    def __init__(self, on_due: Callable[[str], None]) -> None:
        self._deadlines = Deadlines()
        self._on_due = on_due
        self._changed = asyncio.Event()

    def set(self, name: str, at: float) -> None:
        self._deadlines.set(name, at)
        self._changed.set()

    def drop(self, name: str) -> None:
        self._deadlines.drop(name)

    async def run(self) -> None:
        while True:
            now = time.time()
            for name in self._deadlines.pop_due(now):
                self._on_due(name)
            at = self._deadlines.next()
            self._changed.clear()
            try:
                # At most an hour, after which a wall clock that was set forward is noticed.
                async with asyncio.timeout(3600.0 if at is None else min(3600.0, max(0.0, at - time.time()))):
                    await self._changed.wait()
            except TimeoutError:
                continue
