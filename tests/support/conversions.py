"""Tasks and refusals of a converter, in order."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.buffer.tasks.datasets.rows import Item, Refusal, RowRefused
from headrace.buffer.tasks.task import Task


def split(items: Iterable[Item]) -> tuple[tuple[Task, ...], tuple[Refusal, ...]]:
    tasks, refusals = [], []
    for number, item in items:
        if isinstance(item, RowRefused):
            refusals.append(Refusal(line=number, reason=str(item)))
        else:
            tasks.append(item)
    return tuple(tasks), tuple(refusals)
