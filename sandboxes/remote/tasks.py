"""The tasks of a server: whatever runs beyond one request has this one parent, and ends with it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

R = TypeVar("R")

logger = logging.getLogger(__name__)


class ServerTasks:
    """An async context manager; leaving it cancels and awaits every task."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        # The error of the block stays what it is: a group would wrap it.
        await self._group.__aexit__(None, None, None)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run beside the requests. An error of one is logged and ends no other."""
        task = self._group.create_task(self._guard(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("a task of the server failed")

    def share(self, work: Coroutine[Any, Any, R]) -> asyncio.Future[R]:
        """Run to its end whatever becomes of the request that asked; await the future with `asyncio.shield`."""
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        # Nobody may be left to fetch the error: it then counts as seen.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.start(self._run(work, result))
        return result

    async def _run(self, work: Coroutine[Any, Any, R], result: asyncio.Future[R]) -> None:
        try:
            value = await work
        except asyncio.CancelledError:
            result.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - belongs to whoever awaits the result
            result.set_exception(error)
        else:
            result.set_result(value)
