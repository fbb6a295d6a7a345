"""The evaluator actor on sums, reward maps and the repairs of the miniature swe_rl, in real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.evaluation.graders.history import prepare
from headrace.actors.evaluation.graders.verdict import Author, EpisodeRecord, EvaluationRequest, SpokenPart, Verdict
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.pools.config import SandboxSection
from headrace.actors.runtime.pools.leases import SandboxConnections
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.tasks.datasets.terminal import Split
from headrace.buffer.tasks.evaluators import EvaluatorPart, FunctionEvaluator, SumEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.types import Cause
from headrace.policies.miniatures.repairs import REPOSITORY, Repair, repairs
from headrace.sandboxes.base import SandboxSpec
from headrace.serve.tracing.telemetry import TelemetryConfig

pytestmark = pytest.mark.namespaces
REPAIR = repairs(Split.TRAIN)[7]
EPISODE = EpisodeRecord(parts=(SpokenPart(source=Author.POLICY, text="yes"),))


@asynccontextmanager
async def judged(folder: Path) -> AsyncIterator[Callable[[Task, str], Awaitable[Verdict]]]:
    """A function that runs a command in the sandbox of a task and returns the verdict of an evaluator actor."""
    directory = RunDirectory(path=folder / "run")
    directory.path.mkdir()
    telemetry = ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=None)
    async with (
        SandboxPool(SandboxSection(), directory=directory) as pool,
        SandboxConnections() as connections,
    ):

        async def verdict_on(task: Task, command: str) -> Verdict:
            [ref] = await pool.lease([SandboxSpec()])
            sandbox = await connections.attach(ref)
            await prepare(task, sandbox)
            await sandbox.exec(command, cwd=REPOSITORY, timeout_s=20)
            key = f"{task.evaluator.kind} {command}"
            request = EvaluationRequest(key=key, task_id=task.id, sandbox=ref, episode=EPISODE)
            async with Evaluator(pool, telemetry, TaskCatalog(train=[task])) as evaluator:
                ended = (await evaluator.begin({key: request})).ready
                while key not in ended:
                    ended = (await evaluator.fetch([key])).ready
            verdict = ended[key]
            assert isinstance(verdict, Verdict), verdict
            return verdict

        yield verdict_on


def mend(repair: Repair, right: str = "") -> str:
    wrong = repair.values()[repair.module][repair.name]
    return f"sed -i s/{wrong}/{right or repair.right}/ {repair.module}"


async def test_repairs_are_graded_plus_and_minus_one(tmp_path: Path) -> None:
    task = REPAIR.task()
    async with judged(tmp_path) as verdict_on:
        looked = await verdict_on(task, f"grep {REPAIR.name} *.py > /tmp/seen && git status --short")
        assert (looked.reward, looked.cause) == (-1.0, Cause.FAILED), looked
        mended = await verdict_on(task, mend(REPAIR))
        assert (mended.reward, mended.solved) == (1.0, True), mended
        other = await verdict_on(task, f"{mend(REPAIR)}; sed -i '/{REPAIR.name}/!d' *.py")
        assert (other.reward, other.cause) == (-1.0, Cause.FAILED), other
        printed = await verdict_on(task, f"echo \"print('PASSED {REPAIR.name}')\" > hidden_test.py")
        assert printed.reward == -1.0


async def test_a_sum_of_a_repository_and_a_function(tmp_path: Path) -> None:
    task = REPAIR.task()
    function = FunctionEvaluator(function="support.scoring_functions:brevity")
    parts = (
        EvaluatorPart(name="tests", evaluator=task.evaluator),
        EvaluatorPart(name="short", evaluator=function, weight=2.0),
    )
    both = replace(task, evaluator=SumEvaluator(parts=parts))
    raising = EvaluatorPart(
        name="broken", evaluator=replace(function, function="support.scoring_functions:raises"), weight=1.0
    )
    faulty = replace(task, evaluator=SumEvaluator(parts=(parts[0], raising)))
    async with judged(tmp_path) as verdict_on:
        mended = await verdict_on(both, mend(REPAIR))
        assert (mended.reward, mended.solved) == (1.5, True), mended
        assert mended.parts == {"tests": (1.0, 1.0), "short": (0.25, 2.0)}
        failed = await verdict_on(both, "true")
        assert (failed.reward, failed.solved) == (-0.5, False), failed
        lost = await verdict_on(faulty, mend(REPAIR))
        assert (lost.reward, lost.cause) == (None, Cause.EVALUATOR), lost
        assert "broken: support.scoring_functions:raises" in lost.detail
