"""Figures of services: counts of one worker's calls, sums over workers, and the time of each rollout in services.

Invariants:
- The counts of a worker only grow while its process lives; a restarted one begins at 0, and nothing is counted twice.
- The time of a rollout in a service is wall time: calls of one rollout that overlap count once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from headrace.actors.record.files.parts import add_segment
from headrace.actors.record.files.service_totals import ServiceTotals
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.trajectories.breakdown import SERVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """Figures of one service in one worker: totals since the start of its process, and the state now."""

    totals: ServiceTotals = field(default_factory=ServiceTotals)
    limit: int = 0
    """Number of calls that may be in progress at once."""
    in_flight: int = 0
    """Calls in progress."""
    waiting: int = 0
    """Calls that wait for a slot."""


class FiguresSum:
    """Sum of the totals of several workers, over a period."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], ServiceTotals] = {}
        self._sums: dict[str, ServiceTotals] = {}

    def add(self, worker: str, figures: Mapping[str, ServiceFigures]) -> None:
        """Add what has happened since the last call for this worker. `worker` identifies its process."""
        for name, figure in figures.items():
            grown = figure.totals - self._last.get((worker, name), ServiceTotals())
            self._sums[name] = self._sums.get(name, ServiceTotals()) + grown
            self._last[worker, name] = figure.totals

    def take(self) -> dict[str, ServiceTotals]:
        """Return the sums by service, and start a new period."""
        taken, self._sums = self._sums, {}
        return taken


@dataclass(slots=True)
class ServiceTime:
    """Time that one rollout spends in services, by name."""

    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds in each service, waits for slots included."""
    interrupted: str = ""
    """Service whose call was last cancelled; empty if none was. A deadline that passes during a call shows here."""
    _open: dict[str, tuple[int, float]] = field(default_factory=dict)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Count the block as time in this service."""
        calls, start_s = self._open.get(name, (0, self.clock()))
        self._open[name] = (calls + 1, start_s)
        try:
            yield
        finally:
            calls, start_s = self._open.pop(name)
            if calls > 1:
                self._open[name] = (calls - 1, start_s)
            else:
                now = self.clock()
                self.seconds[name] = self.seconds.get(name, 0.0) + now - start_s
                add_segment(Segment(f"{SERVICE}{name}", start_s, now))


_current: ContextVar[ServiceTime | None] = ContextVar("service_time", default=None)


@contextmanager
def service_time(clock: Callable[[], float] = time.monotonic) -> Iterator[ServiceTime]:
    """Measure the time in services of the block and of all tasks that it starts."""
    measured = ServiceTime(clock)
    token = _current.set(measured)
    try:
        yield measured
    finally:
        _current.reset(token)


def current_service_time() -> ServiceTime:
    """Return the measurement around the caller; one that nobody reads if there is none."""
    return _current.get() or ServiceTime()
