"""Tasks for the simulated agent, each of which consists of a probability of success.

Invariants:
- A task's probability of success depends only on the seed and its id.
- The outcome of an attempt depends only on the attempt's name and the task, so that every process draws the same.
- No two tasks are the same problem: probabilities may be equal, so the instruction names the task.
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
    """Return `count` tasks whose probability of success is uniform in [0, 1], or one of `chances`, each equally likely.
    `evaluate_s` is the duration of one evaluation."""
    tasks = []
    for number in range(count):
        task_id = TaskId(f"{family}-{number:05d}")
        draw = random.Random(f"difficulty {seed} {task_id}")
        chance = draw.choice(chances) if chances else draw.random()
        verdict = SimulatedVerdict(success=round(chance, 4), seconds=evaluate_s)
        evaluator = EvaluatorSpec(kind=EvaluatorKind.SIMULATED, expected=verdict.expected())
        tasks.append(Task(id=task_id, family=family, instruction=f"take time for {task_id}", evaluator=evaluator))
    return tuple(tasks)


def is_solved(task: Task, success: float, attempt: str) -> bool:
    """Draw whether `attempt` (rollout and attempt number) solves a task with this probability of success."""
    return random.Random(f"verdict {task.id} {attempt}").random() < success
