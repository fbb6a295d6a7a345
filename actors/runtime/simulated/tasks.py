"""Tasks for the simulated agent, each of which consists of a probability of success.

Invariants:
- A task's probability of success depends only on the seed and its id.
- The outcome of an attempt depends only on the attempt's name and the task, so that every process draws the same.
- No two tasks are the same problem: probabilities may be equal, so the instruction names the task.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from headrace.buffer.primitives.slowdowns import Slowdown, SlowKind
from headrace.buffer.tasks.evaluators import SimulatedEvaluator, SimulatedVerdict
from headrace.buffer.tasks.task import Task, TaskId

FAMILY: Final = "simulated"


def task_name(number: int, family: str = FAMILY) -> TaskId:
    """Return the id of a simulated task."""
    return TaskId(f"{family}-{number:05d}")


def simulated_tasks(
    seed: int,
    count: int,
    *,
    evaluate_s: float,
    family: str = FAMILY,
    chances: Sequence[float] = (),
    images: Sequence[str] = (),
    slowdowns: Sequence[Slowdown] = (),
) -> tuple[Task, ...]:
    """Return `count` tasks whose probability of success is uniform in [0, 1], or one of `chances`, each equally likely.
    `evaluate_s` is the duration of one evaluation, which `slowdowns` of kind `evaluator` prolong. The tasks have
    `images` in turn, or all the default one. Raises ValueError for two slowdowns of one task."""
    tasks = []
    for number in range(count):
        task_id = task_name(number, family)
        draw = random.Random(f"difficulty {seed} {task_id}")
        chance = draw.choice(chances) if chances else draw.random()
        verdict = SimulatedVerdict(success=round(chance, 4), seconds=evaluate_s)
        slow = [each for each in slowdowns if each.kind is SlowKind.EVALUATOR and each.name in ("", task_id)]
        if len(slow) > 1:
            raise ValueError(f"slowdowns: task {task_id} has {len(slow)} of kind evaluator; keep one")
        for slowdown in slow:
            verdict = replace(verdict, slow_share=slowdown.share, slow_factor=slowdown.factor)
        evaluator = SimulatedEvaluator(expected=verdict.expected())
        task = Task(id=task_id, family=family, instruction=f"take time for {task_id}", evaluator=evaluator)
        tasks.append(replace(task, image=images[number % len(images)]) if images else task)
    return tuple(tasks)


def is_solved(task: Task, success: float, attempt: str) -> bool:
    """Draw whether `attempt` (rollout and attempt number) solves a task with this probability of success."""
    return random.Random(f"verdict {task.id} {attempt}").random() < success


def is_slow(task: Task, share: float, attempt: str) -> bool:
    """Draw whether the evaluation of `attempt` is one of this share of slow ones."""
    return share > 0 and random.Random(f"slow verdict {task.id} {attempt}").random() < share
