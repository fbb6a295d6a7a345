"""Reports of untouched repositories, which tell what a patch is not to blame for.

Invariant: a report here was made without any patch, in a clean sandbox; nothing of an agent's reaches it.
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
"""A report of ten thousand tests takes a few megabytes."""


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    report: Report | None = None


class Baselines:
    """The reports of the last MAX_TASKS tasks, each measured once."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def of(self, task: Task, measure: Callable[[], Awaitable[Report]]) -> Report:
        """The report of a task's untouched repository. What `measure` raises is raised, and measured again by the
        next call."""
        digest = task_digest(task)
        entry = self._entries.setdefault(digest, _Entry())
        self._entries.move_to_end(digest)
        while len(self._entries) > MAX_TASKS:
            self._entries.popitem(last=False)
        # Rollouts of one task often end together: the first measures for all.
        async with entry.lock:
            if entry.report is None:
                entry.report = await measure()
            return entry.report
