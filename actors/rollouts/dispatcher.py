"""The dispatcher actor, which passes orders from the buffer to the workers and runs evaluations.

Invariants:
- A training rollout starts only if the buffer has issued it; the buffer's inventory is the only admission control.
- Evaluations have their own slots, so they overtake only training rollouts that are still queued.
- Nothing starts while no engine is serving: the buffer is notified, and evaluations wait.
- An evaluation has a fixed denominator: answers that are still infra after `EVALUATION_ATTEMPTS` are counted
  separately, never as failures. Answers already in the ledger are not repeated.
- A new dispatcher fences off its predecessor, at the workers and at the buffer, before it starts anything.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

from opentelemetry import trace
from opentelemetry.context import Context
from pydantic import Field

from headrace.actors.errors import ActorLost
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.metrics import EvaluationSummary
from headrace.actors.rollouts.answers import Answer
from headrace.actors.rollouts.evaluation_folders import AnswerRecording, EvaluationFolders, evaluation_order
from headrace.actors.rollouts.pacing import AdaptiveLimit, PacingConfig, Pressure
from headrace.actors.rollouts.records import RolloutStore
from headrace.actors.rollouts.summary import summarize_answers, write_summary
from headrace.actors.rollouts.worker_slots import POLL_S, RETRY_S, Attempt, WorkerSlots
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.training.replay import NEVER_EVALUATED, Evaluated
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.buffer.primitives.sections import Section
from headrace.buffer.primitives.single_flight import SingleFlight
from headrace.buffer.tasks.task import Task, tasks_digest
from headrace.buffer.trajectories.types import Cause, GroupId, Outcome, RolloutId, RolloutOrder
from headrace.serve.tracing import span_names as names

if TYPE_CHECKING:
    from headrace.actors.rollouts.worker import RolloutWorker

RECONCILE_S = 60.0
"""Interval at which the buffer is told which attempts the workers carry, even if none is known to be lost."""
MAX_ORDERS_PER_CALL = 128
"""Maximum number of orders requested in one call: small enough that the first of many orders reach the workers while
the rest are still being issued."""


CANCEL_S = 15.0
"""Time limit for the workers of a drained node to end what they were told to cancel. What they still carry then is
issued elsewhere when the node is gone."""
EVALUATION_ATTEMPTS = 3
"""Maximum number of attempts at one evaluation rollout before it counts as infra."""
RECANCEL_S = 1.0

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("headrace.actors.rollouts.dispatcher")


class DispatcherConfig(Section):
    """Concurrency of rollouts."""

    slots_per_worker: int = Field(default=32, ge=1)
    """Maximum number of concurrent training rollouts per worker."""
    evaluation_slots: int = Field(default=24, ge=1)
    """Maximum number of concurrent evaluation rollouts across all workers."""
    pacing: bool = False
    """Adaptive limit on rollouts in flight, lowered while engines or outside services are overloaded. Without it, only
    slots and inventory limit their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherStatus:
    """Counters of a dispatcher."""

    in_flight: int
    evaluating: int
    finished: int
    scored: int
    """Number of training rollouts that have ended with a reward since this dispatcher started."""
    answered: int
    """Number of evaluation attempts that have ended since this dispatcher started."""
    infra: int
    mean_reward: float | None
    """Mean reward of the last 128 scored training rollouts."""
    limit: int = 0
    """Current limit on training rollouts in flight."""
    slowed_by: str = ""
    """Reason for the last decrease of the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsLeft:
    """Rollouts of the workers on a drained node: those that ended in time, and those that were cancelled and are issued
    elsewhere."""

    workers: int = 0
    ended: int = 0
    cancelled: int = 0


class Engines(Protocol):
    """Interface to the engines that the dispatcher needs."""

    async def serving(self, *, unlike: bool, timeout_s: float) -> bool:
        """Return whether an engine is serving, as soon as that differs from `unlike` or after `timeout_s`."""


class Dispatcher:
    """Actor that keeps the workers busy with orders from the buffer and with evaluations."""

    def __init__(
        self,
        config: DispatcherConfig,
        *,
        replay: RolloutStore,
        pool: SandboxPool,
        workers: Sequence[RolloutWorker],
        evaluations: EvaluationFolders | None = None,
        engines: Engines | None = None,
        sources: Sequence[str] = (),
        observing: ActorTelemetry | None = None,
    ) -> None:
        """`sources` are the names of the run's sources of tasks, if it has several."""
        self._sources = sources
        self._engines = engines
        self._observing = observing
        self._engines_serve = asyncio.Event()
        self._engines_serve.set()
        self._folders = evaluations
        self._replay = replay
        self._incarnation = uuid.uuid4().hex
        self._stack = AsyncExitStack()
        self._workers = WorkerSlots(
            workers,
            slots_per_worker=config.slots_per_worker,
            limit=AdaptiveLimit(PacingConfig(enabled=config.pacing), config.slots_per_worker * len(workers), now_s=0.0),
            replay=replay,
            pool=pool,
            trained=self._count,
        )
        self._evaluation_slots = asyncio.Semaphore(config.evaluation_slots)
        self._watching: asyncio.Task[None] | None = None
        self._scored = 0
        self._rewards: list[float] = []
        self._ended: dict[Cause, int] = defaultdict(int)

    async def __aenter__(self) -> Self:
        if self._observing is not None:
            self._stack.enter_context(self._observing.spans("dispatcher"))
        # Attempts in flight belonged to an earlier dispatcher: nobody would report their end.
        await self._reconcile()
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._training: SingleFlight[None] = SingleFlight(tasks)
        self._evaluations: SingleFlight[EvaluationSummary] = SingleFlight(tasks)
        self._workers.watch(tasks)
        if self._engines is not None:
            self._watching = tasks.create_task(self._watch_engines(self._engines))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._workers.stop()
        if self._watching is not None:
            self._watching.cancel()
        self._training.cancel_all()
        self._evaluations.cancel_all()
        await self._stack.aclose()

    async def run(self) -> None:
        """Issue training rollouts until cancelled or until `stop_training` is called."""
        await self._training("run", self._train)

    async def stop_training(self) -> None:
        """Issue no more orders and cancel running training rollouts. The buffer counts them as cancelled and reissues
        them on resume."""
        self._training.cancel("run")
        # Workers can only cancel orders that have arrived.
        await self._workers.calls_ended()
        self._workers.cancel(self._workers.carried)
        await self._workers.calls_ended()
        await self._reconcile()

    async def evaluate(self, tasks: Sequence[Task], *, samples: int, tag: str) -> EvaluationSummary:
        """Sample `samples` answers for each task, and return once all are scored or counted as infra. Answers already
        in the ledger under this tag count. A second call with the same tag joins the running evaluation."""
        return await self._evaluations(tag, lambda: self._evaluate(tasks, samples, tag))

    async def leave_node(self, node: str, *, deadline_s: float) -> RolloutsLeft:
        """Give no further orders to the workers on a node, and wait until their rollouts have ended. After `deadline_s`
        cancel the rest, which the buffer issues again to other workers; a cancelled attempt is no failure. Idempotent.

        The workers get orders again when other processes take their places."""
        slots = self._workers.hold(node)
        carried = sum(len(slot.carried) for slot in slots)
        if slots:
            logger.info("node %s is drained: %d workers with %d rollouts", node, len(slots), carried)
        await self._workers.emptied(slots, timeout_s=deadline_s)
        late = sum(len(slot.carried) for slot in slots)
        ending_s = asyncio.get_running_loop().time() + CANCEL_S
        # Again and again: a cancel call may be lost, or arrive before its order.
        while any(slot.carried for slot in slots) and asyncio.get_running_loop().time() < ending_s:
            self._workers.cancel([attempt for slot in slots for attempt in slot.carried])
            await self._workers.emptied(slots, timeout_s=RECANCEL_S)
        return RolloutsLeft(workers=len(slots), ended=carried - late, cancelled=late)

    async def pace(self, pressure: Pressure) -> None:
        """Adapt the number of rollouts in flight to the load on engines and outside services."""
        self._workers.pace(pressure)

    async def status(self) -> DispatcherStatus:
        return DispatcherStatus(
            limit=self._workers.limit.limit,
            slowed_by=self._workers.limit.reason,
            in_flight=self._workers.in_flight,
            evaluating=self._workers.evaluating,
            finished=sum(self._ended.values()),
            scored=self._scored,
            answered=self._workers.answered,
            infra=self._ended[Cause.INFRA] + self._ended[Cause.EVALUATOR],
            mean_reward=sum(self._rewards) / len(self._rewards) if self._rewards else None,
        )

    async def _train(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._issue())
            tasks.create_task(self._cancel_untrainable())

    async def _issue(self) -> None:
        loop = asyncio.get_running_loop()
        reconciled_s = loop.time()
        while True:
            slot = await self._workers.free()
            if loop.time() - reconciled_s > RECONCILE_S:
                # All received orders are in slots by now: any other order of the buffer was lost.
                await self._reconcile()
                reconciled_s = loop.time()
            limit = self._workers.limit.limit - self._workers.in_flight
            free = min(MAX_ORDERS_PER_CALL, self._workers.room(slot), limit)
            try:
                issued = await self._replay.issue(free, self._incarnation, timeout_s=POLL_S)
            except ActorLost:
                await self._reconcile()
                continue
            self._workers.cancel(issued.to_cancel)
            orders = list(issued.orders)
            while orders:
                # The call took time, and the worker that had room may be dead by now.
                slot = await self._workers.free()
                room = self._workers.room(slot)
                self._workers.train(slot, orders[:room])
                orders = orders[room:]

    async def _cancel_untrainable(self) -> None:
        """Cancel attempts that can no longer be trained, even while no slot is free to ask for orders."""
        known: list[Attempt] = []
        while True:
            untrainable = await until_back(lambda: self._replay.cancellations(known, timeout_s=POLL_S))  # noqa: B023
            if untrainable is not None:
                known = list(untrainable)
                self._workers.cancel(known)

    async def _reconcile(self) -> None:
        """Make the buffer reissue attempts that no worker is carrying. Such attempts exist when this dispatcher is new,
        or when the buffer died, perhaps between recording an order and returning it."""
        carried = self._workers.carried
        await until_back(lambda: self._replay.reconcile(carried, self._incarnation))

    async def _evaluate(self, tasks: Sequence[Task], samples: int, tag: str) -> EvaluationSummary:
        named: dict[str, str | int] = {names.EVALUATION_TAG: tag, names.EVALUATION_TASKS: len(tasks)}
        with tracer.start_as_current_span(names.EVALUATION, Context(), attributes=named) as span:
            known = await until_back(lambda: self._replay.evaluated(GroupId(tag)))
            async with AnswerRecording(self._folders, tag) as recording, asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(self._evaluate_one(evaluation_order(tag, task.id, sample), known, recording))
                    for task in tasks
                    for sample in range(samples)
                ]
            summary = summarize_answers(
                [answer.result() for answer in answers],
                tag=tag,
                tasks=len(tasks),
                samples=samples,
                dataset_sha256=tasks_digest(tasks),
                sources=self._sources,
            )
            if self._folders is not None:
                await asyncio.to_thread(write_summary, self._folders.summary(tag), summary, self._folders.about)
            span.set_attribute(names.EVALUATION_ANSWERS, summary.answers)
            span.set_attribute(names.EVALUATION_INFRA, summary.infra)
            span.set_attribute(names.VERSIONS, list(summary.versions))
            if summary.success is not None:
                span.set_attribute(names.EVALUATION_SUCCESS, summary.success)
            return summary

    async def _evaluate_one(
        self, first: RolloutOrder, known: Mapping[RolloutId, Evaluated], recording: AnswerRecording
    ) -> Answer:
        """Return one recorded answer, without a reward if every attempt was infra."""
        if (recorded := recording.get(first.rollout_id)) is not None:
            return recorded
        before = known.get(first.rollout_id, NEVER_EVALUATED)
        answer = recording.recover(first, before) if before.reward is not None else None
        for attempt in range(before.attempts + 1, before.attempts + 1 + EVALUATION_ATTEMPTS):
            if answer is not None and answer.reward is not None:
                break
            async with self._evaluation_slots:
                await self._engines_serve.wait()
                answer = await self._workers.evaluate(replace(first, attempt=attempt))
        assert answer is not None
        await recording.add(answer)
        return answer

    async def _watch_engines(self, engines: Engines) -> None:
        """Hold new rollouts while no engine is serving. While the engine group itself is unavailable, the last known
        state is kept, since its engines may still be serving."""
        serving = True
        while True:
            known = serving
            try:
                serving = await engines.serving(unlike=known, timeout_s=POLL_S)
            except ActorLost:
                await asyncio.sleep(RETRY_S)
                continue
            if serving:
                self._engines_serve.set()
            else:
                self._engines_serve.clear()
            await until_back(lambda: self._replay.engines(serving=serving))  # noqa: B023

    def _count(self, outcome: Outcome) -> None:
        """Count the end of a training rollout."""
        self._ended[outcome.cause] += 1
        if outcome.reward is not None:
            self._scored += 1
            self._rewards = [*self._rewards[-127:], outcome.reward]
