"""SIGINT and SIGTERM handling in a command that drives a run, from before Ray starts until after it stops.

Invariants:
- An interrupt is never lost: one that arrives while there is no listener is delivered to the next listener.
- Signals in quick succession count as one: a scheduler signals each process of a group, and `--restarts` forwards its
  own signals.
- Ray replaces the handlers while it starts; `reclaim` installs them again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SAME_INTERRUPT_S: Final = 1.0
HANDLED: Final = 2
"""Number of interrupts that are handled: the first drains, the second cancels. A third one raises KeyboardInterrupt,
without waiting for the cleanup."""


class Interrupts:
    """Counter of interrupts; a context manager for the main thread, which restores the earlier handlers on exit."""

    def __init__(self) -> None:
        self.count = 0
        self._last_s = float("-inf")
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.reclaim()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reclaim(self) -> None:
        """Install the signal handlers (again); they count signals until there is a listener."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def note(self) -> bool:
        """Count a signal; return False if it is part of the previous interrupt."""
        now_s = time.monotonic()
        if now_s - self._last_s <= SAME_INTERRUPT_S:
            return False
        self._last_s = now_s
        self.count += 1
        return True

    @contextmanager
    def listening(self, interrupted: Callable[[], object]) -> Iterator[None]:
        """Call `interrupted` in the running event loop on each interrupt, and immediately if one has already
        arrived."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if self.note():
                interrupted()

        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal)
        if self.count:
            interrupted()
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            # Removing a handler from the loop installs Python's default one.
            self.reclaim()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.note() and self.count > HANDLED:
            raise KeyboardInterrupt
