"""An event loop without files whose clock jumps to the next timer when nothing is ready: hours in milliseconds.

Whatever waits for something that no timer will bring would wait for ever: that is an error, at once. Threads and
sockets are refused, for virtual time would race ahead of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
MOST_TURNS = 100_000
"""Turns of the loop without a step in time."""


class _Clock:
    """Stands where a loop has its selector: waiting is moving on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._turns = 0

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise RuntimeError("everything waits, and no timer is set: a deadlock")
        self._turns = self._turns + 1 if timeout_s == 0 else 0
        if self._turns > MOST_TURNS:
            raise RuntimeError("time stands still: something always has more to do at once")
        self.now_s += timeout_s
        return []


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """`time()` starts at 0 and moves only when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Clock()

    def time(self) -> float:
        return self._selector.now_s

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> NoReturn:
        raise RuntimeError("another thread under virtual time")

    def run_in_executor(self, *arguments: Any) -> NoReturn:
        raise RuntimeError("a thread under virtual time")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
