"""Tasks and refusals of a converter, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer.datasets.rows import Refusal, RowRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.buffer.datasets.rows import Item
    from headrace.buffer.tasks import Task


def split(items: Iterable[Item]) -> tuple[tuple[Task, ...], tuple[Refusal, ...]]:
    tasks, refusals = [], []
    for number, item in items:
        if isinstance(item, RowRefused):
            refusals.append(Refusal(line=number, reason=str(item)))
        else:
            tasks.append(item)
    return tuple(tasks), tuple(refusals)
