"""Bounded queue of boots, which limits concurrent and waiting ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from headrace.sandboxes.errors import CapacityExceeded

if TYPE_CHECKING:
    from types import TracebackType

BOOTS: Final = 16
MAX_WAITING: Final = 1024
_RETRY_AFTER_S: Final = 1.0


class BootQueue:
    """An async context manager around one boot, in order of arrival. Raises CapacityExceeded when the queue is full."""

    def __init__(self, boots: int = BOOTS, max_waiting: int = MAX_WAITING) -> None:
        self._places = asyncio.Semaphore(boots)
        self._max_waiting = max_waiting
        self._waiting = 0

    async def __aenter__(self) -> Self:
        if self._places.locked() and self._waiting >= self._max_waiting:
            raise CapacityExceeded(f"{self._waiting} sandboxes wait to boot already", _RETRY_AFTER_S)
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.release()
