"""An event loop without files whose clock jumps to the next timer when nothing is ready: hours in milliseconds.

Invariants:
- `time()` starts at 0 and moves only when nothing is ready; what takes no timer takes no time.
- Threads, sockets, pipes and subprocesses are refused, for virtual time would race ahead of them.
- Whatever waits for something that no timer will bring would wait for ever: that is a Deadlock, at once. Work that
  never lets time pass is a Standstill.
- Chance of the `random` module comes from the seed alone, and what it was before is restored: a history repeats.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Coroutine
    from contextvars import Context

T = TypeVar("T")

MOST_TURNS: Final = 100_000
"""Turns of the loop without a step in time."""
FEW_TIMERS: Final = 100
"""Not worth a cleaning."""
MOST_NAMED: Final = 8
"""Tasks that a Deadlock names."""


class VirtualTimeError(RuntimeError):
    """Something that cannot be done, or go on, in virtual time."""


class Deadlock(VirtualTimeError):
    """Everything waits, and no timer is set."""


class Standstill(VirtualTimeError):
    """Something always has more to do at once."""


def _waiting() -> str:
    """The tasks of the running loop, by name and place."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    named = [f"{task.get_name()} ({_place(task)})" for task in tasks[:MOST_NAMED]]
    more = len(tasks) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _place(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack()
    return f"{frames[-1].f_code.co_qualname}, line {frames[-1].f_lineno}" if frames else "not begun"


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Use it by `run_virtual`, or as a loop factory of `asyncio.Runner`.

    It has no selector, and a heap of its own: timers of one moment are run in the order in which they were set."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._turns = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._cancelled_timers = 0
        self._owner = threading.get_ident()

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001 - as BaseEventLoop does: it says so when cancelled
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Most timers are deadlines that are never met: when more than half of the heap is dead, it is cleaned."""
        self._cancelled_timers += 1
        if self._cancelled_timers > len(self._timers) // 2 + FEW_TIMERS:
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _run_once(self) -> None:
        """Go to the next timer when nothing is ready, and run what is due and ready."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if ready or self._stopping:  # type: ignore[attr-defined]
            self._turns += 1
            if self._turns > MOST_TURNS:
                # What is cancelled now may need some.
                self._turns = 0
                raise Standstill(f"time stands still at {self._now_s:g} s: something always has more to do at once")
        else:
            self._go_on()
        while self._timers and self._timers[0][0] <= self._now_s:
            _, _, timer = heapq.heappop(self._timers)
            timer._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001 - it is in the heap no more
            if timer.cancelled():
                self._cancelled_timers -= 1
            else:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 - as BaseEventLoop does

    def _go_on(self) -> None:
        """Move the clock to the next timer that is still wanted."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
            self._cancelled_timers -= 1
        if not self._timers:
            raise Deadlock(f"everything waits, and no timer is set: a deadlock of {_waiting()}")
        self._now_s = max(self._now_s, self._timers[0][0])
        self._turns = 0

    def _write_to_self(self) -> None:
        """What wakes a loop from another thread; a signal handler of this one needs no waking."""
        if threading.get_ident() != self._owner:
            _refuse("a call from another thread")

    def run_in_executor(self, *arguments: Any) -> NoReturn:  # type: ignore[override]
        _refuse("a thread")

    async def getaddrinfo(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a look-up of a host")

    async def create_connection(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a socket")

    async def create_server(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a socket")

    async def create_unix_connection(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a socket")

    async def create_unix_server(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a socket")

    async def create_datagram_endpoint(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a socket")

    async def sock_connect(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a socket")

    async def connect_read_pipe(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a pipe")

    async def connect_write_pipe(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a pipe")

    async def subprocess_exec(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a subprocess")

    async def subprocess_shell(self, *arguments: Any, **options: Any) -> NoReturn:
        _refuse("a subprocess")

    def add_reader(self, *arguments: Any) -> NoReturn:  # type: ignore[override]
        _refuse("a descriptor to read from")

    def add_writer(self, *arguments: Any) -> NoReturn:  # type: ignore[override]
        _refuse("a descriptor to write to")


def _refuse(what: str) -> NoReturn:
    raise VirtualTimeError(f"{what} under virtual time, which would race ahead of it: run it in a real event loop")


def run_virtual(main: Coroutine[Any, Any, T], *, seed: int = 0) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock, Standstill, VirtualTimeError."""
    before = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(main)
    finally:
        random.setstate(before)
