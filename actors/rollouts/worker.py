"""The rollout worker: one actor that carries hundreds of rollouts as coroutines.

Invariants:
- A rollout is a task of this worker's task group: none outlives the worker, none is lost silently.
- Every started attempt is offered to the buffer once (idempotently, until the buffer is back) and then reported as
  finished to the dispatcher. A cancelled attempt is reported too, with outcome `cancelled`; one whose result is being
  offered is cancelled no more.
- One dispatcher is served at a time: the one that called `reset` last. A call that a dead one left waiting takes
  nothing away.
- Lease, release, evaluate and offer are batch calls: all rollouts ready within 10 ms travel together.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from opentelemetry import trace

from headrace.actors.errors import ActorLost
from headrace.actors.rollouts.answers import answer_of
from headrace.actors.rollouts.recorded_stations import RecordedStations
from headrace.actors.rollouts.rollout import run_rollout
from headrace.actors.rollouts.stations import WorkerParts, WorkerStations
from headrace.actors.runtime.batching import TOGETHER_S, Batcher
from headrace.actors.runtime.retry import until_back
from headrace.buffer.types import Cause, Outcome, Purpose, RolloutId, RolloutResult
from headrace.serve.observing import span_names as names
from headrace.serve.observing.tracing import start_rollout_span

if TYPE_CHECKING:
    from types import TracebackType

    from headrace.actors.rollouts.answers import Answer
    from headrace.buffer.types import RolloutOrder

tracer = trace.get_tracer("headrace.actors.rollouts.worker")

MANY = 8
"""Rollouts of one worker, of which another may be expected to end within `TOGETHER_S`."""
CANCELLED = Outcome(reward=None, trainable=False, cause=Cause.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One attempt that ended and whose result is durable in the buffer. `number` counts the ends of this worker from 1;
    `answer` tells more of an evaluation's."""

    number: int
    rollout_id: RolloutId
    attempt: int
    outcome: Outcome
    answer: Answer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """`incarnation` names this process: what an earlier incarnation leased is nobody's. `assignment` names what it was
    last reset for: whoever knows another one has lost all that it had started here."""

    incarnation: str
    assignment: str
    running: int
    phases: dict[str, int]
    """Rollouts by the phase they are in."""
    turns: int | None = None
    """Turns at simulated engines; a gateway counts its own, None."""
    ended_turns: int | None = None
    """Turns that ended there."""


class RolloutWorker:
    """Runs the rollouts it is given, as coroutines of one process."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._incarnation = uuid.uuid4().hex
        self._stack = AsyncExitStack()
        self._running: dict[tuple[RolloutId, int], asyncio.Task[Outcome]] = {}
        self._offering: set[tuple[RolloutId, int]] = set()
        self._answers: dict[tuple[RolloutId, int], Answer] = {}
        self._occupied: Counter[str] = Counter()
        self._assignment = ""
        self._finished: deque[Finished] = deque()
        self._ends = 0
        """Attempts that have ended, of all dispatchers."""
        self._has_finished = asyncio.Event()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._stack.enter_context(self._parts.observing.spans("worker"))
        self._metrics = self._parts.observing.metrics()
        self._stations = await enter(WorkerStations(self._parts, self._incarnation))
        self._offer: Batcher[tuple[RolloutOrder, RolloutResult], None] = await enter(Batcher(self._offer_many))
        self._known_tasks = self._parts.tasks.load()
        self._group = await enter(asyncio.TaskGroup())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancel_all()
        await self._stack.aclose()

    async def start(self, orders: list[RolloutOrder], assignment: str) -> None:
        """Begin these attempts; an attempt that runs already is left alone. Returns at once.

        Nothing begins when another `assignment` of this worker was meant: the dispatcher gives them up with it.
        Raises LookupError for a task that the worker was not given."""
        if assignment != self._assignment:
            return
        for order in orders:
            # Checked before anything begins: a rollout of an unknown task would end this whole process.
            if (order.purpose, order.task_id) not in self._known_tasks:
                raise LookupError(
                    f"rollout {order.rollout_id}: this worker has no {order.purpose} task {order.task_id!r}; "
                    "add it to WorkerParts.tasks"
                )
        for order in orders:
            key = (order.rollout_id, order.attempt)
            if key not in self._running:
                task = self._running[key] = self._group.create_task(self._run(order))
                task.add_done_callback(partial(self._ended, key))

    async def finished(self, assignment: str, *, after: int, timeout_s: float) -> list[Finished]:
        """What ended with a number above `after`, which says that the caller has what came before; waits up to
        `timeout_s` for the first. Whoever lost an answer asks again.

        Raises ActorLost for any `assignment` but the last: the process died unnoticed, or was reset since, and what it
        carried is gone."""
        self._require(assignment)
        self._forget(after)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_finished.wait()
                if len(self._running) >= MANY:
                    # Where many run, more end soon, and their slots are filled by one call too.
                    await asyncio.sleep(TOGETHER_S)
        self._require(assignment)
        return list(self._finished)

    def _require(self, assignment: str) -> None:
        if assignment != self._assignment:
            raise ActorLost("this worker is another one by now, or serves another dispatcher")

    def _forget(self, upto: int) -> None:
        while self._finished and self._finished[0].number <= upto:
            self._finished.popleft()
        if not self._finished:
            self._has_finished.clear()

    async def cancel(self, attempts: list[tuple[RolloutId, int]]) -> None:
        """End these attempts now; they are offered as `cancelled`. Unknown ones are ignored."""
        for key in attempts:
            if key not in self._offering and (task := self._running.get(key)):
                task.cancel()

    async def reset(self) -> WorkerStatus:
        """Serve the caller from now on: end everything, and forget what was not fetched. Returns when all has ended, so
        that the same attempts may be started again.

        The call makes a new assignment however late it comes, also that of a dead dispatcher or one that was made
        twice: whom it takes the worker from sees so, and resets it again."""
        assignment = self._assignment = uuid.uuid4().hex
        # Whoever waits for the assignment before this one is told now.
        self._has_finished.set()
        self._cancel_all()
        if self._running:
            await asyncio.wait(self._running.values())
        if assignment == self._assignment:
            self._finished.clear()
            self._has_finished.clear()
        return replace(await self.status(), assignment=assignment)

    async def status(self) -> WorkerStatus:
        return WorkerStatus(
            incarnation=self._incarnation,
            assignment=self._assignment,
            running=len(self._running),
            phases=dict(self._occupied),
            turns=self._stations.turns,
            ended_turns=self._stations.ended_turns,
        )

    def _cancel_all(self) -> None:
        for key, task in self._running.items():
            if key not in self._offering:
                task.cancel()

    def _ended(self, key: tuple[RolloutId, int], task: asyncio.Task[Outcome]) -> None:
        """Report the end of an attempt; a broken task ends the process anyway."""
        del self._running[key]
        self._offering.discard(key)
        if not task.cancelled() and task.exception() is not None:
            return
        # Only a task that was cancelled before its first step ends as cancelled.
        outcome = CANCELLED if task.cancelled() else task.result()
        answer = self._answers.pop(key, None)
        self._ends += 1
        self._finished.append(
            Finished(number=self._ends, rollout_id=key[0], attempt=key[1], outcome=outcome, answer=answer)
        )
        self._has_finished.set()

    async def _run(self, order: RolloutOrder) -> Outcome:
        span = start_rollout_span(tracer, order.rollout_id, order.attempt, {names.TASK_ID: order.task_id})
        with trace.use_span(span, end_on_exit=True):
            return (await self._run_and_offer(order)).outcome

    async def _run_and_offer(self, order: RolloutOrder) -> RolloutResult:
        task = self._known_tasks[order.purpose, order.task_id]
        keeping = RecordedStations(self._stations) if self._keeps(order) else None
        try:
            result = await run_rollout(order, task, keeping or self._stations, self._parts.rollout, self._occupied)
        except asyncio.CancelledError:
            result = _cancelled(order)
        # From here on the result counts: a cancellation would only lose it.
        self._offering.add((order.rollout_id, order.attempt))
        attributes: dict[str, str | float] = {names.CAUSE: result.outcome.cause}
        if result.outcome.reward is not None:
            attributes[names.REWARD] = result.outcome.reward
        trace.get_current_span().set_attributes(attributes)
        if order.purpose is Purpose.EVALUATION:
            await self._keep(order, result, keeping)
        with tracer.start_as_current_span(names.BUFFER_OFFER):
            await self._offer((order, result))
        return result

    def _keeps(self, order: RolloutOrder) -> bool:
        return order.purpose is Purpose.EVALUATION and self._parts.evaluations is not None

    async def _keep(self, order: RolloutOrder, result: RolloutResult, keeping: RecordedStations | None) -> None:
        """Remember the answer for the dispatcher, and write its folder where one is kept."""
        answer, folders = answer_of(order, result), self._parts.evaluations
        if keeping is not None and folders is not None and answer.cause is not Cause.CANCELLED:
            answer = await asyncio.to_thread(folders.write, order.group_id, answer, keeping.kept)
        self._answers[order.rollout_id, order.attempt] = answer

    async def _offer_many(self, ended: list[tuple[RolloutOrder, RolloutResult]]) -> list[None]:
        training = [result for order, result in ended if order.purpose is Purpose.TRAIN]
        evaluation = [(order, result) for order, result in ended if order.purpose is Purpose.EVALUATION]
        if training:
            await until_back(lambda: self._parts.replay.offer(training))
            if ran := [result for result in training if result.outcome.cause is not Cause.CANCELLED]:
                self._metrics.append("rollout_phases", mean_phases(ran))
        if evaluation:
            await until_back(lambda: self._parts.replay.record_evaluations(evaluation))
        return [None] * len(ended)


def mean_phases(results: list[RolloutResult]) -> dict[str, float]:
    """Mean seconds by phase over the rollouts, and how many there were."""
    totals: dict[str, float] = {"rollouts": float(len(results))}
    for result in results:
        for phase, seconds in result.phases_s:
            totals[phase] = totals.get(phase, 0.0) + seconds / len(results)
    return totals


def _cancelled(order: RolloutOrder) -> RolloutResult:
    return RolloutResult(rollout_id=order.rollout_id, attempt=order.attempt, outcome=CANCELLED, trajectory=None)
