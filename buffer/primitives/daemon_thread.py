"""Blocking work in a daemon thread, for file systems that may hang.

Invariants:
- The caller may stop waiting at any time; the thread then ends whenever its work does, and its result is dropped.
- A hung thread keeps neither the event loop nor the process from ending. Threads of an executor would: the interpreter
  joins them when it exits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Start `work` in a thread of its own. Return a future with its result or error."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
            # Marks it as retrieved: the caller may have stopped waiting.
            done.exception()
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised by the future
            failure = error
        # The loop may have been closed meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
