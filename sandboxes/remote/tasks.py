"""Background tasks of a server, which outlive single requests and end with the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

R = TypeVar("R")

logger = logging.getLogger(__name__)


class ServerTasks:
    """Task group of a server; an async context manager that cancels and awaits all tasks at its end."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        # Without the error of the block, which the group would wrap.
        await self._group.__aexit__(None, None, None)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task in the background. Its error is logged and ends no other task."""

        async def guarded() -> None:
            try:
                await work
            except Exception:
                logger.exception("a background task of the server failed")

        task = self._group.create_task(guarded())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def share(self, work: Coroutine[Any, Any, R]) -> asyncio.Future[R]:
        """Run a coroutine to its end even if the request is cancelled; await the future with `asyncio.shield`."""
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        # Retrieve the error, because there may be no caller left to do so.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())

        async def run() -> None:
            try:
                value = await work
            except asyncio.CancelledError:
                result.cancel()
                raise
            except Exception as error:  # noqa: BLE001 - raised where the result is awaited
                result.set_exception(error)
            else:
                result.set_result(value)

        self.start(run())
        return result
