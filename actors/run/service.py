"""The service: start order, supervision, evaluations, end of a run.

Invariants:
- Every actor is named; a restarted service finds those that live and starts those that do not.
- A lost actor is called again when Ray has restarted it; what it was doing is repeated idempotently or abandoned by
  the buffer.
- An actor that answers nothing for `hang_s` is killed. (The service itself is guarded by its driver, `launch`.)
- A run ends: with its steps done or its data used up, drained, or with an error that says why. A stall is such an
  error, and so is a data set of which every task is parked.
- An evaluation on the way that has begun is recorded before the final one; one that has not is left out, for the
  weights that it would be called after are gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from headrace.actors.errors import RunStalled
from headrace.actors.record.housekeeping import EVERY_S, keep_house, thin_out_evaluations
from headrace.actors.record.metrics import EvaluationMetric, StallMetric
from headrace.actors.rollouts.stations import TaskCatalog
from headrace.actors.run.parts import Externals, ServiceParts, parts_of, periodic_evaluations
from headrace.actors.run.progress_signs import signs_of, stall_detector, work_clocks
from headrace.actors.run.supervision import STATUS_TIMEOUT_S, Supervision, or_none
from headrace.actors.runtime.call_guard import AwakeClock, keep_running
from headrace.actors.runtime.operations import until_back
from headrace.actors.training.replay import parked_line, refuse_all_parked
from headrace.buffer.primitives.single_flight import SingleFlight
from headrace.buffer.tasks import load_tasks
from headrace.buffer.types import GroupId
from headrace.serve.observing.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from headrace.actors.record.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig
    from headrace.actors.runtime.runtime import Runtime
    from headrace.buffer.core.replay import BufferStatus
    from headrace.buffer.types import StepReport

R = TypeVar("R")

logger = logging.getLogger(__name__)


class Service(ServiceParts):
    """One run from first to last step."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory | None,
        runtime: Runtime,
        *,
        externals: Externals | None = None,
    ) -> None:
        evaluations = None if directory is None else periodic_evaluations(config, directory)
        if directory is not None:
            tasks = TaskCatalog(train=directory.train_tasks, evaluation=directory.heldout_tasks)
        else:
            given = () if externals is None else externals.tasks
            tasks = TaskCatalog(train=given, evaluation=given)
        super().__init__(config, directory, runtime, evaluations=evaluations, tasks=tasks, externals=externals)
        self._started_s = time.monotonic()
        self._phase = "starting"
        self._draining = asyncio.Event()
        self._step = 0
        self._no_more_steps = False
        self._moved = asyncio.Event()
        self._success: float | None = None
        self._ended: dict[str, float | None] | None = None
        self._rewards: deque[float] = deque(maxlen=32)
        self._last_tokens = (time.monotonic(), 0)
        self._tokens_per_s = 0.0

    async def __aenter__(self) -> Self:
        heldout = () if self._directory is None else load_tasks(self._directory.heldout_tasks)
        self._heldout = heldout[: self._config.evaluation.tasks]
        self._metrics = self._observing.metrics()
        async with self._starting():
            async with asyncio.TaskGroup() as starting:
                for start in (self._start_replay, self._start_pool, self._start_gateway):
                    starting.create_task(start())
            await self._start_workers(self.replay)
            async with asyncio.TaskGroup() as starting:
                starting.create_task(self._start_dispatcher(self.replay))
                starting.create_task(self._start_learner())
            self._supervision = Supervision(
                self._config, self._runtime, self._metrics, parts_of(self, self.learner), look_s=self._externals.look_s
            )
            # Left first: a run that is under way ends before its actors do.
            self._runs: SingleFlight[bool] = SingleFlight(await self._stack.enter_async_context(asyncio.TaskGroup()))
            self._stack.callback(self._runs.cancel_all)
        return self

    async def run(self) -> bool:
        """Evaluate, train, evaluate. True when all steps are done or the data is used up, False when the run was
        drained before. A call that arrives while another one runs waits for the same end.

        Raises RunStalled, TasksParked, DiskFull, and what ends the learner or the dispatcher for good.
        """
        return await self._runs("run", self._run)

    async def _run(self) -> bool:
        self._no_more_steps = False
        try:
            async with self._guarded(self._supervise()) as tasks:
                keeping = tasks.create_task(self._keep_house())
                done = await self._train_and_evaluate(tasks)
                keeping.cancel()
        finally:
            self._end_steps()
        self._phase = "done" if done else "drained"
        return done

    async def progress(self) -> Progress:
        """One moment of the run; parts that are restarting show their last or no value."""
        replay, learner, dispatcher, pool, gateway = await asyncio.gather(
            or_none(self.replay.status),
            or_none(self.learner.status),
            or_none(self.dispatcher.status),
            or_none(self.pool.status),
            or_none(None if self.gateway is None else self.gateway.stats),
        )
        self._count_tokens(gateway.sampled_tokens if gateway else 0)
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
            held_up_by=(replay.held if replay else "") or (loads.line() if loads else ""),
            rewards=tuple(self._rewards),
        )

    async def drain(self) -> None:
        """Stop issuing, save after the step under way, and let `run` return False."""
        self._phase = "draining"
        self._draining.set()
        await until_back(self.learner.drain)

    async def _evaluated_base(self) -> bool:
        """False when the run drains before it is done: the next one goes on with the answers that it has."""
        if "base" not in await self._ended_evaluations():
            return await self._unless_drained(self._evaluate_once("base", self._config.evaluation.samples))
        # There may be steps, which the learner saves when it drains.
        await self._evaluate_once("base", self._config.evaluation.samples)
        return True

    async def _unless_drained(self, evaluation: Coroutine[Any, Any, None]) -> bool:
        """False when the evaluation was broken off."""
        async with asyncio.TaskGroup() as tasks:
            evaluating = tasks.create_task(evaluation)
            draining = tasks.create_task(self._draining.wait())
            await asyncio.wait([evaluating, draining], return_when=asyncio.FIRST_COMPLETED)
            evaluating.cancel()
            draining.cancel()
        return not evaluating.cancelled()

    async def reached(self, step: int) -> bool:
        """True once the learner has committed so many optimizer updates, False when training ended before it had."""
        while self._step < step and not self._no_more_steps:
            self._moved.clear()
            await self._moved.wait()
        return self._step >= step

    async def _train_and_evaluate(self, tasks: asyncio.TaskGroup) -> bool:
        await keep_running(self.learner.open, self.learner.status)
        self._phase = "base evaluation"
        if not await self._evaluated_base():
            return False
        self._phase = "training"
        dispatching = tasks.create_task(keep_running(self.dispatcher.run, self.dispatcher.status))
        on_the_way = tasks.create_task(self._evaluate_on_the_way())
        # One that died meanwhile may not know that the run drains.
        await until_back(self._ready_learner)
        end = await keep_running(self.learner.run, self._ready_learner)
        # Supervision may have seen none of the steps: a service that came back late finds them all done.
        learner = await or_none(self.learner.status)
        completed = end.used_up or end.version.step >= self._config.training.steps
        if not completed:
            on_the_way.cancel()
        self._end_steps()
        self._note(end.version.step, learner.last if learner else None)
        dispatching.cancel()
        await until_back(self.dispatcher.stop_training)
        if not completed:
            return False
        if end.used_up:
            await self._tell_used_up(end.version.step)
        await on_the_way
        self._phase = "final evaluation"
        await self._evaluate_once("final", self._config.evaluation.samples)
        return True

    def _end_steps(self) -> None:
        """Whoever waits for a step that has not come waits in vain."""
        self._no_more_steps = True
        self._moved.set()

    async def _tell_used_up(self, step: int) -> None:
        """Log after how many steps the data ended, and what is parked. Raises TasksParked."""
        parked = (await until_back(self.replay.status)).parked
        tasks = len(self._externals.tasks)
        if self._directory is not None:
            tasks = len(await asyncio.to_thread(load_tasks, self._directory.train_tasks))
        refuse_all_parked(parked, tasks=tasks, step=step)
        passes, wanted = self._config.buffer.passes, self._config.training.steps
        logger.warning("the data is used up (buffer.passes = %s) after %d of %d steps", passes, step, wanted)
        if parked:
            logger.warning("not trained on to the end: %s", parked_line(parked))

    async def _ready_learner(self) -> None:
        """A new incarnation of the learner knows nothing of a drain that was asked for before."""
        await self.learner.status()
        if self._draining.is_set():
            await self.learner.drain()

    async def _evaluate_on_the_way(self) -> None:
        """Held-out success every so many steps, while training goes on; the base and final evaluations are separate."""
        every = self._config.evaluation.every_steps
        if not every:
            return
        for step in range(every, self._config.training.steps, every):
            if not await self.reached(step):
                return
            tag = f"step-{step}"
            if self._no_more_steps and not await self._has_begun(tag):
                logger.warning("evaluation %s is left out: it had not begun when training ended", tag)
                continue
            await self._evaluate_once(tag, self._config.evaluation.samples_on_the_way)

    async def _has_begun(self, tag: str) -> bool:
        """Whether an answer of this evaluation is in the ledger."""
        return bool(await until_back(lambda: self.replay.evaluated(GroupId(tag))))

    async def _evaluate_once(self, tag: str, samples: int) -> None:
        """Run and record one evaluation; a resumed run leaves out what it has, and one without tasks has none."""
        if not self._heldout:
            return
        ended = await self._ended_evaluations()
        if tag in ended:
            self._success = ended[tag]
            return
        step = 0 if tag == "base" else self._step
        summary = await keep_running(
            lambda: self.dispatcher.evaluate(self._heldout, samples=samples, tag=tag), self.dispatcher.status
        )
        if summary.success is None:
            logger.error("evaluation %s: every answer was infra; nothing is recorded", tag)
            return
        self._success = summary.success
        # In this order: a crash in between leaves one record twice, and no evaluation without one.
        self._metrics.append(EvaluationMetric(step=step, **asdict(summary)))
        await until_back(lambda: self.replay.end_evaluation(GroupId(tag), step, asdict(summary)))
        ended[tag] = summary.success
        if self._evaluations is not None:
            root, now_s = self._evaluations.root, self._externals.clock()
            await asyncio.to_thread(thin_out_evaluations, root, self._config.retention, now_s=now_s)

    async def _ended_evaluations(self) -> dict[str, float | None]:
        """The success of those that have ended, by tag: asked for once, since a run of months has thousands."""
        if self._ended is None:
            self._ended = await until_back(self.replay.ended_evaluations)
        return self._ended

    async def _keep_house(self) -> None:
        """Bound what grows beside the ledger, until cancelled."""
        while self._directory is not None:
            await asyncio.to_thread(keep_house, self._directory, self._config.retention)
            await asyncio.sleep(EVERY_S)

    async def _supervise(self) -> NoReturn:
        """Notice steps and stalls: a run that gets nowhere ends with what each part was doing."""
        now, look_s = asyncio.get_running_loop().time, self._externals.look_s
        clock = AwakeClock(2 * STATUS_TIMEOUT_S + look_s)
        detector = stall_detector(self._config, clock.read(now()))
        longest = work_clocks(self._config)
        while True:
            await asyncio.sleep(look_s)
            self._refuse_full_disk()
            look = await self._supervision.look()
            if look.learner and look.learner.version:
                self._note(look.learner.version.step, look.learner.last)
            now_s = clock.read(now())
            reason = detector.stalled(now_s, signs_of(look, longest))
            if (warning := reason or detector.warning(now_s)) is not None:
                logger.warning("%s", warning)
                self._metrics.append(StallMetric(ended=reason is not None, reason=warning))
            if reason is not None:
                raise RunStalled(f"{reason}; {await self._diagnosis()}")

    def _note(self, step: int, last: StepReport | None) -> None:
        """Wake who waits for a step, and keep its reward for the display; nothing when the step is known."""
        if step <= self._step:
            return
        self._step = step
        self._moved.set()
        if last is not None and (reward := last.metrics.get("mean_reward")) is not None:
            self._rewards.append(reward)

    async def _diagnosis(self) -> str:
        progress = await self.progress()
        replay = await or_none(self.replay.status)
        return (
            f"phase {progress.phase}, step {progress.step}, "
            f"{progress.rollouts_in_flight} rollouts in flight, {progress.sandboxes} sandboxes, "
            f"{self._supervision.diagnosis()}; {_buffer_line(replay)}"
        )

    def _count_tokens(self, total: int) -> None:
        now, (then, before) = time.monotonic(), self._last_tokens
        if now > then:
            self._tokens_per_s = max(0, total - before) / (now - then)
        self._last_tokens = (now, total)


def _buffer_line(status: BufferStatus | None) -> str:
    """What the buffer holds, and which tasks it gave up."""
    if status is None:
        return "the buffer does not answer"
    held = ", ".join(f"{count} {state}" for state, count in status.rollouts.items() if count) or "nothing"
    line = f"the buffer holds {held} and admits {status.admit}"
    why = f"orders are held: {status.held}" if status.held else ""
    suspects = ", ".join(f"host {host} gets probes only: {reason}" for host, reason in status.suspects.items())
    return "; ".join(part for part in (line, why, suspects, parked_line(status.parked)) if part)
