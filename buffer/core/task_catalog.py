"""The tasks that orders and requests name by id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.buffer.tasks.task import Task, TaskId, load_tasks
from headrace.buffer.trajectories.types import Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCatalog:
    """Source of tasks: either files, which each actor reads once, or the tasks themselves."""

    train: Path | Sequence[Task] = ()
    evaluation: Path | Sequence[Task] = ()

    def load(self) -> Mapping[tuple[Purpose, TaskId], Task]:
        """Return all tasks keyed by purpose and id, since both sets may use the same id. Raises TaskFileError."""
        return {
            (purpose, task.id): task
            for purpose, source in ((Purpose.TRAIN, self.train), (Purpose.EVALUATION, self.evaluation))
            for task in (load_tasks(source) if isinstance(source, Path) else source)
        }
