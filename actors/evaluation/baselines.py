"""The cache of test reports of untouched repositories, which show failures that no patch caused.

Invariant: every report was made without a patch in a clean sandbox; agents cannot influence it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.buffer.tasks import task_digest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.actors.evaluation.report import Report
    from headrace.buffer.tasks import Task

MAX_TASKS: Final = 64
"""A report of 10,000 tests takes a few megabytes."""


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    report: Report | None = None


class Baselines:
    """Reports of the MAX_TASKS most recently used tasks, each measured once."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def of(self, task: Task, measure: Callable[[], Awaitable[Report]]) -> Report:
        """Return the report of the untouched repository of a task, measured on the first call. Errors of `measure`
        are raised, and the next call measures again."""
        digest = task_digest(task)
        entry = self._entries.setdefault(digest, _Entry())
        self._entries.move_to_end(digest)
        while len(self._entries) > MAX_TASKS:
            self._entries.popitem(last=False)
        # Rollouts of one task often end together, so the others wait for the first measurement.
        async with entry.lock:
            if entry.report is None:
                entry.report = await measure()
            return entry.report
