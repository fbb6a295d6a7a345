"""Interrupts of a command that drives a run: SIGINT and SIGTERM, from before Ray starts to after it has stopped.

Invariants:
- An interrupt is never lost: one that comes while nobody listens is passed on to the next who does.
- Signals that come together are one: a scheduler signals each process of a group, and `--restarts` passes its own on.
- Ray replaces the handlers while it starts: `reclaim` takes them back.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SAME_INTERRUPT_S: Final = 1.0
AT_ONCE: Final = 2
"""The first drains, the second cancels; one more does not even wait for what closes."""


class Interrupts:
    """Use as a context manager, in the main thread; the handlers of before are back at its end."""

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
        """Handle the signals here (again): they are counted until somebody listens."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def note(self) -> bool:
        """Count a signal; False when it belongs to the interrupt before."""
        now_s = time.monotonic()
        if now_s - self._last_s <= SAME_INTERRUPT_S:
            return False
        self._last_s = now_s
        self.count += 1
        return True

    @contextmanager
    def listening(self, interrupted: Callable[[], object]) -> Iterator[None]:
        """Call `interrupted` in the running event loop at each interrupt, and at once when there was one already."""
        loop = asyncio.get_running_loop()

        def heard() -> None:
            if self.note():
                interrupted()

        for number in SIGNALS:
            loop.add_signal_handler(number, heard)
        if self.count:
            interrupted()
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            # A removed handler leaves Python's own one in its place.
            self.reclaim()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.note() and self.count > AT_ONCE:
            raise KeyboardInterrupt
