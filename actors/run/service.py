"""Service that executes a run: start order of the actors, supervision, evaluations and the end of the run.

Invariants:
- Every actor has a name; a restarted service finds the actors that are alive and starts the others.
- A lost actor is called again after Ray has restarted it; its interrupted work is repeated idempotently or abandoned by
  the buffer.
- An actor that does not answer for `hang_s` is killed. (The service itself is guarded by its driver, `launch`.)
- A run ends when its steps are done, its data is used up, it is drained, or an error ends it. A stall counts as an
  error, and so does a data set in which every task is parked.
- An evaluation that has started during training is recorded before the final one. One that has not started by the end
  of training is skipped, because the weights of its step are gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn, Self

from headrace.actors.engines.gate import stats_of
from headrace.actors.errors import RunStalled
from headrace.actors.record.files.housekeeping import thin_out_evaluations
from headrace.actors.record.files.metrics import StallMetric
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.node_drain import RunLeft, leave_node
from headrace.actors.run.parts import Externals, RunActors, periodic_evaluations, recipe_digest, supervised_actors
from headrace.actors.run.progress import Progress
from headrace.actors.run.progress_signs import signs_of, stall_detector, work_clocks
from headrace.actors.run.supervision import (
    STATUS_TIMEOUT_S,
    Supervision,
    diagnosis_of,
    failing_line,
    or_none,
    readiness_of,
)
from headrace.actors.runtime.actors.call_guard import AwakeClock, keep_running
from headrace.actors.runtime.actors.nodes import NodeProcess, this_process
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.recording import record
from headrace.actors.runtime.actors.runtime import Runtime
from headrace.actors.runtime.version import RUNNING
from headrace.actors.training.external_loop import note_trainer
from headrace.actors.training.replay import parked_line, refuse_all_parked
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.buffer.primitives.single_flight import SingleFlight
from headrace.buffer.tasks.task import load_tasks
from headrace.buffer.trajectories.types import GroupId, StepReport
from headrace.policies.learners.checkpoint_retention import begin_evaluation, end_evaluation

STALL_RECORD_S = 5.0
"""Time limit for the record of a stall, which may have the lost writer of the metrics as its cause."""

logger = logging.getLogger(__name__)


class Service(ResourceOwner):
    """Actor that executes one run from the first to the last step."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory | None,
        runtime: Runtime,
        *,
        externals: Externals | None = None,
    ) -> None:
        evaluations = None if directory is None else periodic_evaluations(config, directory)
        given = externals or Externals()
        tasks = TaskCatalog(train=given.tasks, evaluation=given.heldout or given.tasks)
        if directory is not None:
            tasks = TaskCatalog(train=directory.train_tasks, evaluation=directory.heldout_tasks)
        super().__init__()
        self.actors = RunActors(config, directory, runtime, evaluations=evaluations, tasks=tasks, externals=given)
        self._config, self._directory, self._runtime = config, directory, runtime
        self._evaluations, self._externals = evaluations, given
        self._started_s = time.monotonic()
        self._phase = "starting"
        self._draining = asyncio.Event()
        self._step = 0
        self._no_more_steps = False
        self._moved = asyncio.Event()
        self._success: float | None = None
        self._ended: dict[str, float | None] | None = None
        self._rewards: deque[float] = deque(maxlen=32)
        self._last_tokens, self._tokens_per_s = (time.monotonic(), 0), 0.0

    async def __aenter__(self) -> Self:
        folder = self._directory
        heldout = self._externals.heldout if folder is None else load_tasks(folder.heldout_tasks)
        self._heldout = self._config.held_out(heldout)
        self._stack.push_async_exit(self.actors.__aexit__)
        async with self.actors.starting():
            await self.actors.start_observer()
            async with asyncio.TaskGroup() as starting:
                for start in (self.actors.start_replay, self.actors.start_pool, self.actors.start_gateways):
                    starting.create_task(start())
            await self.actors.start_workers(self.actors.replay)
            async with asyncio.TaskGroup() as starting:
                starting.create_task(self.actors.start_dispatcher(self.actors.replay))
                starting.create_task(self.actors.start_learner())
            self._supervision = Supervision(
                self._config,
                self._runtime,
                self.actors.replay,
                supervised_actors(self.actors, self.actors.learner),
                interval_s=self._externals.check_interval_s,
            )
            # Entered last, so that a call of `run` in progress ends before its actors stop.
            self._runs: SingleFlight[bool] = SingleFlight(await self._stack.enter_async_context(asyncio.TaskGroup()))
            self._stack.callback(self._runs.cancel_all)
        return self

    async def run(self) -> bool:
        """Evaluate, train, and evaluate again. Return True when all steps are done or the data is used up, False if the
        run was drained first. Concurrent calls share one execution.

        Raises RunStalled, TasksParked, DiskFull, and permanent errors of the learner or the dispatcher.
        """
        return await self._runs("run", self._run)

    async def _run(self) -> bool:
        self._no_more_steps = False
        try:
            async with self.actors.guarded(self._supervise()) as tasks:
                beside = [tasks.create_task(self.actors.keep_house()), tasks.create_task(self.actors.call_observer())]
                done = await self._train_and_evaluate(tasks)
                for task in beside:
                    task.cancel()
                await self._supervision.finish()
        finally:
            self._end_steps()
        self._phase = "done" if done else "drained"
        return done

    async def progress(self) -> Progress:
        """Return the current progress; for an actor that is restarting, its last known value is used, if any."""
        replay, learner, dispatcher, pool, gateway = await asyncio.gather(
            or_none(self.actors.replay.status),
            or_none(self.actors.learner.status),
            or_none(self.actors.dispatcher.status),
            or_none(self.actors.pool.status),
            or_none(partial(stats_of, self.actors.gateways) if self.actors.gateways else None),
        )
        now_s, tokens = time.monotonic(), gateway.sampled_tokens if gateway else 0
        then_s, before = self._last_tokens
        if now_s > then_s:
            self._tokens_per_s = max(0, tokens - before) / (now_s - then_s)
        self._last_tokens = (now_s, tokens)
        last, loads = learner.last if learner else None, self._supervision.held_up_by
        return Progress(
            phase=self._phase,
            step=learner.version.step if learner and learner.version else 0,
            total_steps=self._config.training.steps,
            version=str(learner.version) if learner and learner.version else "-",
            elapsed_s=time.monotonic() - self._started_s,
            reward=dispatcher.mean_reward if dispatcher else None,
            held_out_success=self._success,
            mean_staleness=last.metrics.get("mean_staleness") if last else None,
            rollouts_in_flight=dispatcher.in_flight + dispatcher.evaluating if dispatcher else 0,
            sandboxes=pool.live if pool else 0,
            tokens_per_s=self._tokens_per_s,
            learner_idle_share=learner.idle_share if learner else None,
            infra_failures=dispatcher.infra if dispatcher else 0,
            parser_fails=gateway.parser_fails if gateway else False,
            untrained=gateway.coverage.alarm if gateway else "",
            collapsed=learner.collapsed if learner else (),
            held_up_by=(replay.held if replay else "") or failing_line(replay) or (loads.line() if loads else ""),
            rewards=tuple(self._rewards),
            absent=tuple(self.actors.absences.lines(self._externals.clock())),
        )

    async def identity(self) -> tuple[str, str]:
        """Return the version of headrace and the digest of the configuration with which this service runs."""
        return RUNNING, recipe_digest(self._config)

    async def process_ids(self) -> dict[str, int]:
        """Return the process id of each actor by name, for operators and fault tests."""
        return await self.actors.process_ids()

    async def processes(self) -> list[NodeProcess]:
        """Return the processes of the run's actors that are known, wherever they are."""
        return [this_process(), *self._runtime.processes()]

    async def readiness(self) -> dict[str, Any]:
        """Return the fields of `runs.contract.Readiness`."""
        return await readiness_of(supervised_actors(self.actors, self.actors.learner), self.actors.replay, self._config)

    async def leave_node(self, node: str, host: str, *, deadline_s: float) -> RunLeft:
        """See `node_drain.leave_node`."""
        actors = supervised_actors(self.actors, self.actors.learner)
        dispatcher, engines, learner = actors.dispatcher, actors.engines, actors.learner
        return await leave_node(
            node, host, dispatcher=dispatcher, engines=engines, learner=learner, deadline_s=deadline_s
        )

    async def drain(self) -> None:
        """Stop issuing rollouts, save after the current step, and make `run` return False."""
        self._phase = "draining"
        self._draining.set()
        await until_back(self.actors.learner.drain)

    async def _evaluated_base(self) -> bool:
        """Run the base evaluation; return False if the run is drained before the evaluation is done. A resumed run
        keeps the answers that are in the ledger."""
        samples = self._config.evaluation.samples
        if "base" in await self._ended_evaluations():
            # Not interrupted by a drain: there may be steps already, which the learner saves when it drains.
            await self._evaluate_once("base", samples)
            return True
        async with asyncio.TaskGroup() as tasks:
            evaluating = tasks.create_task(self._evaluate_once("base", samples))
            draining = tasks.create_task(self._draining.wait())
            await asyncio.wait([evaluating, draining], return_when=asyncio.FIRST_COMPLETED)
            evaluating.cancel()
            draining.cancel()
        return not evaluating.cancelled()

    async def reached(self, step: int) -> bool:
        """Wait until the learner has committed `step` optimizer updates; return False if training ends first."""
        while self._step < step and not self._no_more_steps:
            self._moved.clear()
            await self._moved.wait()
        return self._step >= step

    async def _train_and_evaluate(self, tasks: asyncio.TaskGroup) -> bool:
        await keep_running(self.actors.learner.open, self.actors.learner.status)
        self._phase = "base evaluation"
        opening = tasks.create_task(self._keep_learner_open())
        evaluated = await self._evaluated_base()
        opening.cancel()
        if not evaluated:
            return False
        self._phase = "training"
        dispatching = tasks.create_task(keep_running(self.actors.dispatcher.run, self.actors.dispatcher.status))
        on_the_way = tasks.create_task(self._evaluate_on_the_way())
        # A learner that was restarted in the meantime may not know that the run drains.
        await until_back(self._ready_learner)
        end = await keep_running(self.actors.learner.run, self._ready_learner)
        # Supervision may have seen none of the steps: after a late restart of the service all may be done already.
        learner = await or_none(self.actors.learner.status)
        completed = end.used_up or end.version.step >= self._config.training.steps
        if not completed:
            on_the_way.cancel()
        self._end_steps()
        self._note(end.version.step, learner.last if learner else None)
        dispatching.cancel()
        await until_back(self.actors.dispatcher.stop_training)
        if not completed:
            return False
        if end.used_up:
            parked = (await until_back(self.actors.replay.status)).parked
            folder, trained = self._directory, self._externals.tasks
            trained = trained if folder is None else await asyncio.to_thread(load_tasks, folder.train_tasks)
            for name, number in Counter(map(self._config.source_of, trained)).items():
                refuse_all_parked(parked, tasks=number, step=end.version.step, source=name)
            passes, wanted = self._config.buffer.passes, self._config.training.steps
            logger.warning(
                "the data is used up (buffer.passes = %s) after %d of %d steps", passes, end.version.step, wanted
            )
            if parked:
                logger.warning("the run ends with parked tasks: %s", parked_line(parked))
        await on_the_way
        self._phase = "final evaluation"
        await self._evaluate_once("final", self._config.evaluation.samples)
        return True

    async def _keep_learner_open(self) -> NoReturn:
        """Open the successors of a learner that dies before the first step: engines that died with it may have no
        weights until a learner pushes some."""
        while True:
            await asyncio.sleep(self._externals.check_interval_s)
            await keep_running(self.actors.learner.open, self.actors.learner.status)

    def _end_steps(self) -> None:
        """Wake all callers of `reached` that wait for steps beyond the last one."""
        self._no_more_steps = True
        self._moved.set()

    async def _ready_learner(self) -> None:
        """Wait for the learner, and repeat an earlier drain request, which a restarted learner does not know."""
        await self.actors.learner.status()
        if self._draining.is_set():
            await self.actors.learner.drain()

    async def _evaluate_on_the_way(self) -> None:
        """Evaluate every `evaluation.every_steps` during training; the base and final evaluations are separate."""
        every = self._config.evaluation.every_steps
        if not every:
            return
        for step in range(every, self._config.training.steps, every):
            if not await self.reached(step):
                return
            tag = f"step-{step}"
            if self._no_more_steps and not await until_back(partial(self.actors.replay.evaluated, GroupId(tag))):
                logger.warning("evaluation %s is skipped: it had not started when training ended", tag)
                continue
            await self._evaluate_once(tag, self._config.evaluation.samples_on_the_way)

    async def _evaluate_once(self, tag: str, samples: int) -> None:
        """Run and record one evaluation, unless it is already recorded or there are no held-out tasks."""
        if not self._heldout:
            return
        ended = await self._ended_evaluations()
        if tag in ended:
            self._success = ended[tag]
            return
        step = 0 if tag == "base" else self._step
        # The base evaluation rates the start policy, which has no checkpoint.
        rated = None if self._directory is None or tag == "base" else self._directory.checkpoints
        if rated is not None:
            await asyncio.to_thread(begin_evaluation, rated, step)
        summary = await keep_running(
            lambda: self.actors.dispatcher.evaluate(self._heldout, samples=samples, tag=tag),
            self.actors.dispatcher.status,
        )
        if rated is not None:
            rate = partial(end_evaluation, rated, tag=tag, success=summary.success, versions=summary.versions)
            await asyncio.to_thread(rate)
        if summary.success is None:
            logger.error("evaluation %s: every answer failed with an infrastructure error; nothing is recorded", tag)
            return
        self._success = summary.success
        # In this order, a crash in between duplicates a metrics record, but never loses one.
        await record(self.actors.replay, replace(summary, step=step))
        await until_back(lambda: self.actors.replay.end_evaluation(GroupId(tag), step, asdict(summary)))
        ended[tag] = summary.success
        if self._evaluations is not None:
            root, now_s = self._evaluations.root, self._externals.clock()
            await asyncio.to_thread(thin_out_evaluations, root, self._config.retention, now_s=now_s)

    async def _ended_evaluations(self) -> dict[str, float | None]:
        """Return the success of the evaluations that have ended, by tag, from a cache: long runs have thousands."""
        if self._ended is None:
            self._ended = await until_back(self.actors.replay.ended_evaluations)
        return self._ended

    async def _supervise(self) -> NoReturn:
        """Check the actors regularly, and end a stalled run with a diagnosis."""
        now, interval_s = asyncio.get_running_loop().time, self._externals.check_interval_s
        clock = AwakeClock(2 * STATUS_TIMEOUT_S + interval_s)
        detector = stall_detector(self._config, clock.read(now()))
        longest = work_clocks(self._config)
        while True:
            await asyncio.sleep(interval_s)
            self.actors.refuse_full_disk()
            status = await self._supervision.check()
            note_trainer(self.actors.absences, status.learner)
            if status.learner and status.learner.version:
                self._note(status.learner.version.step, status.learner.last)
            now_s = clock.read(now())
            reason = detector.stalled(now_s, signs_of(status, longest))
            if (warning := reason or detector.warning(now_s)) is not None:
                logger.warning("%s", warning)
                await record(
                    self.actors.replay, StallMetric(ended=reason is not None, reason=warning), deadline_s=STALL_RECORD_S
                )
            if reason is not None:
                progress, stored = await self.progress(), await or_none(self.actors.replay.status)
                raise RunStalled(f"{reason}; {diagnosis_of(progress, stored, self._supervision)}")

    def _note(self, step: int, last: StepReport | None) -> None:
        """Wake the callers of `reached` and store the reward for the display, if the step is new."""
        if step <= self._step:
            return
        self._step = step
        self._moved.set()
        if last is not None and (reward := last.metrics.get("mean_reward")) is not None:
            self._rewards.append(reward)
