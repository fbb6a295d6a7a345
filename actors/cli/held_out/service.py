"""The service behind `headrace eval`, in which a fixed policy answers held-out tasks without training.

Invariants:
- The parts are those of a run, without the learner and the buffer: engines receive the policy through a push, as in
  training, so every answer has the version that sampled it.
- An evaluation ends either with all answers recorded or with an error that gives the reason. A stall counts as an
  error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NoReturn, Self

from headrace.actors.errors import RunStalled
from headrace.actors.record.files.metrics import EvaluationSummary
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.rollouts.evaluation_folders import EvaluationFolders
from headrace.actors.rollouts.records import EvaluationRecords
from headrace.actors.run.config import RunConfig
from headrace.actors.run.parts import RunActors, supervised_actors
from headrace.actors.run.progress import Progress
from headrace.actors.run.progress_signs import signs_of, stall_detector, work_clocks
from headrace.actors.run.supervision import STATUS_TIMEOUT_S, or_none, snapshot_of
from headrace.actors.runtime.actors.call_guard import AwakeClock, keep_running
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import Runtime
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.buffer.tasks.task import Task
from headrace.policies.learner import WeightsSnapshot

SUPERVISION_S = 1.0


class EvaluationService(ResourceOwner):
    """One evaluation of one policy on `tasks`. `weights` are the weights of the model that `config` names, with their
    version."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        runtime: Runtime,
        *,
        evaluations: EvaluationFolders,
        tasks: Sequence[Task],
        weights: WeightsSnapshot,
    ) -> None:
        super().__init__()
        self._config = config
        self._actors = RunActors(
            config, directory, runtime, evaluations=evaluations, tasks=TaskCatalog(evaluation=tuple(tasks))
        )
        self._held_out = tasks
        self._weights = weights
        self._started_s = time.monotonic()
        self._wanted = 0

    async def __aenter__(self) -> Self:
        self._stack.push_async_exit(self._actors.__aexit__)
        async with self._actors.starting():
            async with asyncio.TaskGroup() as starting:
                records = starting.create_task(
                    self._actors.spawn("records", EvaluationRecords, self._actors.observing.metrics())
                )
                starting.create_task(self._actors.start_pool())
                starting.create_task(self._actors.start_gateways())
            await self._actors.start_workers(records.result())
            await self._actors.start_dispatcher(records.result())
        return self

    async def run(self, *, samples: int, tag: str) -> EvaluationSummary:
        """Push the weights, and evaluate. Raises RunStalled, DiskFull, EngineUnavailable, and fatal errors of the
        dispatcher."""
        self._wanted = len(self._held_out) * samples
        async with self._actors.guarded(self._supervise()):
            await until_back(lambda: self._actors.engines.push(self._weights, rollouts_in_flight=0))
            return await keep_running(
                lambda: self._actors.dispatcher.evaluate(self._held_out, samples=samples, tag=tag),
                self._actors.dispatcher.status,
            )

    async def progress(self) -> Progress:
        """Return the current progress, with one step per answer."""
        dispatcher, pool = await asyncio.gather(
            or_none(self._actors.dispatcher.status), or_none(self._actors.pool.status)
        )
        return Progress(
            phase="evaluation",
            step=min(dispatcher.answered, self._wanted) if dispatcher else 0,
            total_steps=self._wanted,
            version=str(self._weights.version),
            elapsed_s=time.monotonic() - self._started_s,
            rollouts_in_flight=dispatcher.evaluating if dispatcher else 0,
            sandboxes=pool.live if pool else 0,
        )

    async def _supervise(self) -> NoReturn:
        clock = AwakeClock(2 * STATUS_TIMEOUT_S)
        detector = stall_detector(self._config, clock.read(time.monotonic()))
        longest = work_clocks(self._config)
        while True:
            await asyncio.sleep(SUPERVISION_S)
            self._actors.refuse_full_disk()
            status = await snapshot_of(supervised_actors(self._actors))
            if (reason := detector.stalled(clock.read(time.monotonic()), signs_of(status, longest))) is not None:
                raise RunStalled(f"{reason}; {await self.progress()}")
