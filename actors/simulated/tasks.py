"""Tasks for the simulated agent: nothing but a chance of success.

Invariants:
- A task's chance depends on the seed and its id alone.
- Whether an attempt solves its task is a draw from the attempt's name and the task alone: whoever asks, and whenever,
  hears the same.
- No two tasks are the same problem: chances collide, so the instruction names the task.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from headrace.buffer.tasks import EvaluatorKind, EvaluatorSpec, SimulatedVerdict, Task, TaskId

if TYPE_CHECKING:
    from collections.abc import Sequence


def simulated_tasks(
    seed: int, count: int, *, evaluate_s: float, family: str = "simulated", chances: Sequence[float] = ()
) -> tuple[Task, ...]:
    """From hopeless to easy, or with these chances of success, each equally likely; `evaluate_s` is the time of one
    evaluation."""
    names = [TaskId(f"{family}-{number:05d}") for number in range(count)]
    return tuple(_task(name, family, _chance(seed, name, chances), evaluate_s) for name in names)


def is_solved(task: Task, success: float, attempt: str) -> bool:
    """Whether `attempt` (rollout and attempt number) solves a task with this chance of success."""
    return random.Random(f"verdict {task.id} {attempt}").random() < success


def _chance(seed: int, task_id: TaskId, chances: Sequence[float]) -> float:
    draw = random.Random(f"difficulty {seed} {task_id}")
    return draw.choice(chances) if chances else draw.random()


def _task(task_id: TaskId, family: str, chance: float, evaluate_s: float) -> Task:
    verdict = SimulatedVerdict(success=round(chance, 4), seconds=evaluate_s)
    evaluator = EvaluatorSpec(kind=EvaluatorKind.SIMULATED, expected=verdict.expected())
    return Task(id=task_id, family=family, instruction=f"take time for {task_id}", evaluator=evaluator)
