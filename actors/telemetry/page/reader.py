"""What a run's files say, for the views of its page.

Invariants:
- Only files are read, and nothing is written: the run may be going on, over, killed, or on another disk.
- A damaged or missing file leaves its part of a view empty and is named there; the rest of the view is shown.
- Each part is read at most once at a time, in a few threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from headrace.actors.engines.members_file import Roster, read_roster
from headrace.actors.errors import RunMissing
from headrace.actors.record.files.run_directory import RunDirectory, read_configuration
from headrace.actors.record.files.run_state import RunState, run_state
from headrace.actors.record.files.running import FOLDER
from headrace.actors.telemetry.page.computed import Computed, ComputedByKey, Reading
from headrace.actors.telemetry.page.metrics_tail import MetricsTail, Records
from headrace.actors.telemetry.page.rollout_reading import RolloutDetails, read_rollout
from headrace.actors.telemetry.page.slow_verdicts import Explained, RolloutInCohort, explained, time_of
from headrace.actors.telemetry.slow.in_flight import InFlight, in_flight
from headrace.buffer.audit.condition import read_condition
from headrace.buffer.audit.evidence import has_begun
from headrace.buffer.errors import LedgerRefused

T = TypeVar("T")

THREADS: Final = 4
EXPLAINING_THREADS: Final = 2
MAX_ROLLOUTS_READ: Final = 4
"""Rollouts that are read at the same time; more requests are asked to come again."""
FIRST_WAIT_S: Final = 0.3
"""Time for which a view waits for verdicts, which may take seconds; then it is shown without them."""

TIMES_WAIT_S: Final = 1.5
ROLLOUTS_KEPT: Final = 16
"""Rollouts of which the details, and the times beside their cohorts, are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """State of the run as a whole. `problem` says why the ledger cannot be read, if so; `started_s` and `ended_s` are
    those of its last driver."""

    name: str
    state: RunState
    total_steps: int | None
    max_staleness: int | None
    model: str
    started_s: float | None
    ended_s: float | None
    parked: int
    held: str
    problem: str
    empty: bool


class RunReader:
    """Reader of one run. Raises RunMissing for a folder that is no run."""

    def __init__(self, run_dir: Path) -> None:
        directory = RunDirectory.at(run_dir)
        if not directory.config.is_file() and not (directory.path / "ledger.db").is_file():
            raise RunMissing(
                f"{run_dir}: not a run directory (config.json is missing); list runs with `headrace status`"
            )
        self.directory = directory
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="observer")
        # Those of large runs are processes of their own with hundreds of megabytes.
        self._explaining = ThreadPoolExecutor(EXPLAINING_THREADS, thread_name_prefix="observer-explains")
        self._rollouts = ComputedByKey(
            lambda asked: self._computed(lambda: read_rollout(directory, asked), self._rollout_mark),
            kept=ROLLOUTS_KEPT,
            busy=MAX_ROLLOUTS_READ,
        )
        self._times = ComputedByKey(
            lambda rollout: Computed(self._explaining, lambda: time_of(directory.path, rollout), self._ledger_mark),
            kept=ROLLOUTS_KEPT,
            busy=MAX_ROLLOUTS_READ,
        )
        tail = MetricsTail(directory.metrics)
        self._metrics = self._computed(tail.read, tail.mark)
        self._summary = self._computed(lambda: summary_of(directory), time.monotonic)
        self._running = self._computed(self._read_running, self._running_mark)
        self._roster = self._computed(lambda: read_roster(directory.engines), lambda: mark_of(directory.engines))
        self._explained = Computed(self._explaining, lambda: explained(directory.path), self._ledger_mark)
        self._mark = self._computed(self._read_mark, time.monotonic)

    def close(self) -> None:
        """End the threads, without waiting for a reading in progress."""
        for executor in (self._executor, self._explaining):
            executor.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of work that would hold up the event loop, such as rendering a long page."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def metrics(self) -> Records:
        return await self._metrics.now()

    async def summary(self) -> Summary:
        return await self._summary.now()

    async def running(self) -> list[InFlight]:
        """Return what has not ended. Raises LedgerRefused."""
        return await self._running.now()

    async def running_soon(self) -> list[InFlight] | None:
        """Return what has not ended if it is known soon. Raises LedgerRefused."""
        reading = await self._running.get(FIRST_WAIT_S)
        return None if reading is None else reading.value

    async def roster(self) -> Roster:
        return await self._roster.now()

    async def explained(self) -> Reading[Explained] | None:
        """Return the verdicts as far as they are known; None while the first ones are computed. Raises LedgerRefused,
        RunError."""
        return await self._explained.get(FIRST_WAIT_S)

    async def mark(self) -> Hashable:
        """Return something that changes when the files do."""
        return await self._mark.now()

    async def rollout(self, asked: str) -> RolloutDetails:
        """Return a rollout. Raises RolloutUnknown, LedgerRefused, Busy."""
        return await self._rollouts.of(asked).now()

    async def times(self, rollout_id: str) -> Reading[RolloutInCohort | None] | None:
        """Return the times of a rollout beside its cohort, if they are known soon. Raises LedgerRefused, RunError,
        Busy."""
        return await self._times.of(rollout_id).get(TIMES_WAIT_S)

    def _computed(self, read: Callable[[], T], mark: Callable[[], Hashable]) -> Computed[T]:
        return Computed(self._executor, read, mark)

    def _read_running(self) -> list[InFlight]:
        if not has_begun(self.directory.path):
            return []
        return in_flight(self.directory, driven=self.directory.is_driven())

    def _running_mark(self) -> Hashable:
        # While the run goes on, ages grow without any change of files.
        return (self._read_mark(), time.monotonic() if self.directory.is_driven() else None)

    def _rollout_mark(self) -> Hashable:
        logs = self.directory.logs
        return (self._ledger_mark(), tuple(sorted(mark_of(each) for each in logs.glob("*.jsonl"))))

    def _ledger_mark(self) -> Hashable:
        path = self.directory.path
        return tuple(mark_of(path / name) for name in ("ledger.db", "ledger.db-wal", "archive.db"))

    def _read_mark(self) -> Hashable:
        path = self.directory.path
        return (
            self._ledger_mark(),
            mark_of(self.directory.metrics),
            mark_of(self.directory.engines),
            tuple(sorted(mark_of(each) for each in (path / FOLDER).glob("*.json"))),
            self.directory.is_driven(),
        )


def mark_of(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file does; zeros if there is none."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def summary_of(directory: RunDirectory) -> Summary:
    """Read the summary of a run."""
    config = _table(lambda: read_configuration(directory))
    held, parked, problem, empty = "", 0, "", False
    try:
        empty = not has_begun(directory.path)
        if not empty:
            condition = read_condition(directory.path)
            held, parked = "; ".join(outage.reason for outage in condition.outages), len(condition.parked)
    except LedgerRefused as error:
        problem = str(error)
    session = last_session(directory.sessions)
    return Summary(
        name=directory.path.name,
        state=run_state(directory),
        total_steps=_whole(config, "training", "steps"),
        max_staleness=_whole(config, "buffer", "max_staleness"),
        model=str(_table(lambda: config.get("model")).get("path", "")),
        started_s=_number(session.get("started_s")),
        ended_s=_number(session.get("ended_s")),
        parked=parked,
        held=held,
        problem=problem,
        empty=empty,
    )


def _table(read: Callable[[], Any]) -> dict[str, Any]:
    """Return what is read if it is a table, else an empty one: a damaged configuration hides no run."""
    try:
        found = read()
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole(config: dict[str, Any], table: str, key: str) -> int | None:
    found = _table(lambda: config.get(table)).get(key)
    return found if type(found) is int else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def last_session(path: Path) -> dict[str, Any]:
    try:
        lines = [line for line in path.read_bytes()[-4096:].splitlines() if line.strip()]
        return _table(lambda: orjson.loads(lines[-1]))
    except (OSError, IndexError):
        return {}
