"""The attempts that one worker is running: their file, the oldest one, and those that take too long.

Invariant: an attempt is in the book from its start until its task has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from headrace.actors.record.files.running import (
    EVERY_S,
    FEW,
    FOLDER,
    STUCK,
    RunningFile,
    RunningRollout,
    remove_oldest_running,
    write_running,
)
from headrace.actors.rollouts.attempt_time import AttemptTime
from headrace.actors.runtime.actors.nodes import this_node
from headrace.buffer.trajectories.types import RolloutId, RolloutOrder
from headrace.serve.tracing.attempts import working_for

logger = logging.getLogger(__name__)
REMEMBERED: Final = 256
MAX_TASKS: Final = 1024


class RunningBook:
    """Running attempts of the worker with this name."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._running: dict[tuple[RolloutId, int], tuple[RolloutOrder, AttemptTime]] = {}
        self._stuck = StuckWatch()

    def begin(self, order: RolloutOrder, spent: AttemptTime) -> None:
        """Add an attempt."""
        self._running[order.rollout_id, order.attempt] = order, spent

    def end(self, key: tuple[RolloutId, int], *, scored: bool) -> None:
        """Remove an attempt, which may have ended before it began. `scored` says whether it has a reward."""
        order, spent = self._running.pop(key, (None, None))
        if order is not None and spent is not None:
            self._stuck.ended(order, spent.in_progress()[2] if scored else None)

    def oldest(self) -> str:
        """Describe the attempt that has run longest; empty if there is none."""
        if not self._running:
            return ""
        order, spent = max(self._running.values(), key=lambda one: one[1].in_progress()[2])
        part, part_s, total_s = spent.in_progress()
        name = f"rollout {order.rollout_id} attempt {order.attempt}"
        return f"{name} has run for {total_s:.0f} s and has been in {part} for {part_s:.0f} s"

    def file(self) -> RunningFile:
        """Return what runs now."""
        now_s, rollouts = time.time(), []
        for order, spent in self._running.values():
            part, part_s, total_s = spent.in_progress()
            rollouts.append(
                RunningRollout(
                    rollout_id=order.rollout_id,
                    attempt=order.attempt,
                    task=order.task_id,
                    purpose=order.purpose,
                    agent=str(spent.labels.get("agent", "")),
                    host=spent.host,
                    part=part,
                    started_s=now_s - total_s,
                    part_since_s=now_s - part_s,
                )
            )
        return RunningFile(
            worker=self._worker, node=this_node(), pid=os.getpid(), written_s=now_s, rollouts=tuple(rollouts)
        )

    async def keep(self, run_dir: Path) -> NoReturn:
        """Write the file and name stuck attempts, for ever. A disk that refuses the file is named once."""
        folder, written, fails = run_dir / FOLDER, False, False
        while True:
            for order, spent in self._running.values():
                part, part_s, total_s = spent.in_progress()
                if (line := self._stuck.warning(order, total_s, part, part_s)) is not None:
                    with working_for((order.rollout_id, order.attempt)):
                        logger.warning("%s", line)
            try:
                await asyncio.to_thread(write_running, folder, self.file())
                if not written:
                    await asyncio.to_thread(remove_oldest_running, folder)
                written, fails = True, False
            except OSError as error:
                if not fails:
                    logger.warning("%s: the file of running rollouts cannot be written: %s", folder, error)
                fails = True
            await asyncio.sleep(EVERY_S)


class StuckWatch:
    """Durations of ended attempts, and the attempts that have been named: each that takes far longer than its cohort is
    named once. The cohort is the ended attempts at the same task and for the same purpose in this process; with fewer
    than `FEW`, those at all tasks. Without `FEW` ended attempts nothing is stuck."""

    def __init__(self) -> None:
        self._ended: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        self._p95_s: dict[tuple[str, str], float] = {}
        """That of each cohort since an attempt of it last ended: it is asked for each running rollout."""
        self._named: set[tuple[str, int]] = set()

    def ended(self, order: RolloutOrder, seconds: float | None) -> None:
        """Count an attempt that has ended with a result after `seconds`; None for one without a result."""
        self._named.discard((order.rollout_id, order.attempt))
        if seconds is None:
            return
        for task in (order.task_id, ""):
            known = self._ended.setdefault((order.purpose, task), deque(maxlen=REMEMBERED))
            known.append(seconds)
            self._p95_s.pop((order.purpose, task), None)
            self._ended.move_to_end((order.purpose, task))
        while len(self._ended) > MAX_TASKS:
            cohort, _ = self._ended.popitem(last=False)
            self._p95_s.pop(cohort, None)

    def p95_s(self, order: RolloutOrder) -> float | None:
        """Return the 95th percentile of the attempt's cohort in seconds; None if too few have ended."""
        for task in (order.task_id, ""):
            cohort = (order.purpose, task)
            known = self._ended.get(cohort, ())
            if len(known) >= FEW:
                if cohort not in self._p95_s:
                    self._p95_s[cohort] = float(np.quantile(known, 0.95))
                return self._p95_s[cohort]
        return None

    def warning(self, order: RolloutOrder, seconds: float, part: str, part_s: float) -> str | None:
        """Return a line about an attempt that has just become stuck after `seconds`; None if it is not, or was named
        before."""
        key = (order.rollout_id, order.attempt)
        if key in self._named or (p95_s := self.p95_s(order)) is None or seconds <= STUCK * p95_s:
            return None
        self._named.add(key)
        return (
            f"rollout {order.rollout_id} attempt {order.attempt} has taken {seconds:.1f} s, more than {STUCK:g} times "
            f"the p95 of its cohort ({p95_s:.1f} s): it has been in {part} for {part_s:.1f} s (task {order.task_id})"
        )
