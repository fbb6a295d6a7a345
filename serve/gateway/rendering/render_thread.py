"""A thread that renders for a gateway which was given a renderer of its own. Otherwise processes do (`processes.py`).

Invariants:
- The calls of a `DaemonThread` run one at a time, in the order in which they were submitted.
- A call whose waiter is cancelled before the call begins does not run; a call that has begun cannot be stopped, and its
  result is discarded.
- Its thread is a daemon thread. An executor would join its threads when the interpreter exits, so that a call that
  never ends would keep the process alive after SIGTERM.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.serve.gateway.rendering.work import Work

if TYPE_CHECKING:
    from headrace.serve.gateway.rendering.render import Renderer

T = TypeVar("T")


class DaemonThread:
    """Thread that runs functions for an event loop: `await thread.run(function)`, and finally `stop`."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """Run the function in the thread; return its result or raise its exception."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Stop the thread after the current call, without waiting for it; calls that have not begun are cancelled."""
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


class RenderThread:
    """Does the works of all owners in one thread, in their order."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._thread = DaemonThread("render")

    async def run(self, owner: str, work: Work[T]) -> T:
        """Return the result of a work. Raises what the work raises."""
        return await self._thread.run(lambda: work(self._renderer))

    def forget(self, owner: str) -> None:
        """Do nothing: nothing is remembered of an owner."""

    async def aclose(self) -> None:
        """Stop the thread without waiting for a work in progress."""
        self._thread.stop()
