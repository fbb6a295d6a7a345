"""A run one of whose tasks is far slower than the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.tasks.datasets.terminal import Split, generate
from headrace.buffer.tasks.task import Task, write_tasks
from support import run_rig as rig

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]

SLOW_CHECK_S = 20


def slowed(task: Task) -> Task:
    """The task with an evaluator that first takes its time."""
    check = f"import time\ntime.sleep({SLOW_CHECK_S})\n{task.evaluator.check}"
    return replace(task, evaluator=replace(task.evaluator, check=check))


async def test_the_learner_keeps_stepping_while_a_straggler_is_running(tmp_path: Path) -> None:
    straggler, *others = generate(seed=3, count=12, split=Split.TRAIN)
    write_tasks(tmp_path / "train.jsonl", [slowed(straggler), *others])
    write_tasks(tmp_path / "heldout.jsonl", generate(seed=3, count=4, split=Split.HELD_OUT))
    files = (f"tasks.train={tmp_path}/train.jsonl", f"tasks.heldout={tmp_path}/heldout.jsonl")
    patience = ("rollout.evaluate_timeout_s=60",)
    async with rig.open_service(tmp_path, "straggler", *files, *patience) as (service, directory):
        assert await service.run()

    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.steps, report.trained_twice, report.lost, report.poison) == (8, 0, 0, 0)
    evidence = read_evidence(directory.path)
    slow_groups = {group.group_id for group in evidence.groups if group.task_id == straggler.id}
    slow_rollouts = {rollout.rollout_id for rollout in evidence.rollouts if rollout.group_id in slow_groups}
    steps_while_out = [
        sum(attempt.issued_at_s < commit.committed_at_s < attempt.ended_at_s for commit in evidence.commits)
        for attempt in evidence.attempts
        if attempt.rollout_id in slow_rollouts and attempt.ended_at_s is not None
    ]
    assert max(steps_while_out) >= 2
