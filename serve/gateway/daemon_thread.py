"""A daemon thread for calls that take seconds and must not delay the exit of the process.

Invariants:
- Calls run one at a time, in the order of submission.
- A call whose waiter is cancelled before it begins does not run; one that has begun cannot be stopped, and its result
  is discarded.
- The thread is a daemon: an executor joins its threads when the interpreter exits, so that a call that never ends would
  keep the process alive after SIGTERM.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class DaemonThread:
    """`await thread.run(function)` from an event loop, then `stop`."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """Return the result of the function, or raise its exception."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the thread after the current call, without waiting for it; calls that have not begun are cancelled."""
        # Not with `empty()`: the thread may take the last call in between, and `get` would block for ever.
        with suppress(queue.Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None:
                    call[0].cancel()
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again where the future is awaited
                future.set_exception(error)
