"""Work that outlives the cancellation of whoever awaits it, such as giving back what was leased."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

R = TypeVar("R")

_ABANDONED: Final[set[asyncio.Task[Any]]] = set()
"""The event loop alone holds tasks weakly, and may lose those that nothing awaits."""


async def shielded(work: Coroutine[Any, Any, R]) -> R:
    """Await work that goes on if the caller is cancelled. Its error is then nobody's, and is not logged."""
    task = asyncio.create_task(work)
    _ABANDONED.add(task)

    def forget(done: asyncio.Task[R]) -> None:
        _ABANDONED.discard(done)
        if not done.cancelled():
            done.exception()

    task.add_done_callback(forget)
    return await asyncio.shield(task)
