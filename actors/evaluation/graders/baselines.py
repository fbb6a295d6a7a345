"""What the graders found without an agent's changes, kept for each task and grader.

Invariants:
- Everything here was measured in a clean sandbox without a patch, so agents cannot influence it.
- It is measured once in a run, however many rollouts and evaluators ask, and whatever restarts in between. A file that
  cannot be read or written costs a measurement, and no verdict.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from headrace.actors.evaluation.graders.report import Report
from headrace.actors.evaluation.graders.verdict import Verdict
from headrace.buffer.primitives.durable_files import create_file
from headrace.buffer.tasks.task import Task, task_digest
from headrace.buffer.trajectories.types import Cause

Found = TypeVar("Found", Report, Verdict)
MAX_TASKS: Final = 64
"""Number of tasks in memory; a report of 10,000 tests takes a few megabytes."""
_REPORT: Final = TypeAdapter(Report)
_VERDICT: Final = TypeAdapter(Verdict)


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    found: Any = None


class Baselines:
    """Reports and verdicts of untouched tasks, those of the MAX_TASKS most recently used ones in memory, all of them in
    `folder` if it is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def report(self, task: Task, measure: Callable[[], Awaitable[Report]]) -> Report:
        """Return the report of a task's untouched repository. Errors from `measure` are raised, and the next call
        measures again."""
        return await self._of(f"{task_digest(task)}.report", _REPORT, measure, lambda _: True)

    async def verdict(self, task: Task, measure: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """Return the verdict on a task's untouched files. One that says that the check broke is not kept, since chance
        may have broken it."""
        name = f"{task_digest(task)}.verdict"
        return await self._of(name, _VERDICT, measure, lambda found: found.cause is not Cause.EVALUATOR)

    async def _of(
        self,
        name: str,
        form: TypeAdapter[Found],
        measure: Callable[[], Awaitable[Found]],
        is_kept: Callable[[Found], bool],
    ) -> Found:
        entry = self._entries.setdefault(name, _Entry())
        self._entries.move_to_end(name)
        while len(self._entries) > 2 * MAX_TASKS:
            self._entries.popitem(last=False)
        # Rollouts of one task often end together, so the others wait for the first measurement.
        async with entry.lock:
            if entry.found is None:
                entry.found = await asyncio.to_thread(self._read, name, form)
            if entry.found is not None:
                return entry.found  # type: ignore[no-any-return]
            found = await measure()
            if is_kept(found):
                entry.found = found
                await asyncio.to_thread(self._write, name, form.dump_json(found))
            return found

    def _read(self, name: str, form: TypeAdapter[Found]) -> Found | None:
        with suppress(OSError, ValidationError, zlib.error):
            if self._folder is not None:
                return form.validate_json(zlib.decompress((self._folder / name).read_bytes()))
        return None

    def _write(self, name: str, data: bytes) -> None:
        with suppress(OSError):
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                create_file(self._folder / name, zlib.compress(data, 1))
