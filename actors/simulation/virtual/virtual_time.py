"""Event loop in virtual time, whose clock jumps to the next timer when nothing is ready.

Invariants:
- `time()` starts at 0 and advances only when nothing is ready; work without a timer takes no time.
- Threads, sockets, pipes and subprocesses are refused, because virtual time would advance before they answer.
- When all tasks wait and no timer is set, Deadlock is raised immediately. Standstill is raised when tasks are always
  ready, so that time never advances.
- The `random` module is seeded and its earlier state restored afterwards, so that a history repeats.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")

MOST_TURNS: Final = 100_000
"""Maximum number of loop iterations without time advancing."""
FEW_TIMERS: Final = 100
"""Number of cancelled timers below which the heap is never cleaned."""
MOST_NAMED: Final = 8
"""Maximum number of tasks that a Deadlock names."""


class VirtualTimeError(RuntimeError):
    """An operation is not possible in virtual time."""


class Deadlock(VirtualTimeError):
    """All tasks wait, and no timer is set."""


class Standstill(VirtualTimeError):
    """Tasks are always ready, so that time never advances."""


def _waiting_tasks() -> str:
    """Return the names and positions of the running loop's tasks."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    named = []
    for task in tasks[:MOST_NAMED]:
        frames = task.get_stack()
        position = f"{frames[-1].f_code.co_qualname}, line {frames[-1].f_lineno}" if frames else "not started"
        named.append(f"{task.get_name()} ({position})")
    more = len(tasks) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _refusal(what: str) -> Any:
    """Return a method that refuses an operation of the loop."""

    def refuse(self: VirtualTimeLoop, *arguments: object, **options: object) -> NoReturn:
        raise VirtualTimeError(f"{what} is not possible in virtual time; use a real event loop")

    return refuse


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Event loop for `run_virtual` and loop factory for `asyncio.Runner`.

    It has no selector, and its own heap of timers: timers of one moment run in the order in which they were set."""

    is_virtual = True

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
        """Clean the heap when more than half of it is cancelled: most timers are timeouts that never fire."""
        self._cancelled_timers += 1
        if self._cancelled_timers > len(self._timers) // 2 + FEW_TIMERS:
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def _run_once(self) -> None:
        """Advance to the next timer when nothing is ready, and run all callbacks that are due or ready."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if ready or self._stopping:  # type: ignore[attr-defined]
            self._turns += 1
            if self._turns > MOST_TURNS:
                # Reset, because the cleanup of the cancelled tasks needs iterations too.
                self._turns = 0
                raise Standstill(f"virtual time does not advance beyond {self._now_s:g} s: some task is always ready")
        else:
            while self._timers and self._timers[0][2].cancelled():
                heapq.heappop(self._timers)
                self._cancelled_timers -= 1
            if not self._timers:
                raise Deadlock(f"all tasks wait and no timer is set: a deadlock of {_waiting_tasks()}")
            self._now_s = max(self._now_s, self._timers[0][0])
            self._turns = 0
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

    def _write_to_self(self) -> None:
        """Refuse calls from other threads. Signal handlers of this thread also call this, which needs no wake-up."""
        if threading.get_ident() != self._owner:
            self._refuse_call()

    _refuse_call = _refusal("a call from another thread")
    run_in_executor = _refusal("a thread")
    getaddrinfo = _refusal("a host lookup")
    create_connection = create_server = create_unix_connection = create_unix_server = _refusal("a socket")
    create_datagram_endpoint = sock_connect = _refusal("a socket")
    connect_read_pipe = connect_write_pipe = _refusal("a pipe")
    subprocess_exec = subprocess_shell = _refusal("a subprocess")
    add_reader = _refusal("a descriptor to read from")
    add_writer = _refusal("a descriptor to write to")


def run_virtual(main: Coroutine[Any, Any, T], *, seed: int = 0) -> T:
    """Run a coroutine like `asyncio.run`, in virtual time. Raises Deadlock, Standstill, VirtualTimeError."""
    before = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(main)
    finally:
        random.setstate(before)
