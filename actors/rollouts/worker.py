"""The rollout worker actor, which runs hundreds of rollouts as coroutines.

Invariants:
- Each rollout is a task in this worker's task group, so no rollout outlives the worker or is lost silently.
- Every started attempt is offered to the buffer once (idempotently, with retries) and then reported as finished to the
  dispatcher. A cancelled attempt is reported too, with outcome `cancelled`. An attempt can no longer be cancelled once
  its result is being offered.
- The worker serves one dispatcher at a time: the last one that called `reset`. Pending calls from a dead dispatcher
  consume no results.
- Lease, release, evaluate and offer are batch calls that cover all rollouts that are ready within 10 ms.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from opentelemetry import trace

from headrace.actors.errors import ActorLost
from headrace.actors.record.files.running import RunningFile
from headrace.actors.rollouts.answers import Answer, answer_of
from headrace.actors.rollouts.attempt_time import AttemptTime
from headrace.actors.rollouts.rollout import CANCELLED, RunningAttempt
from headrace.actors.rollouts.running_book import RunningBook
from headrace.actors.rollouts.stations import WorkerParts, WorkerStations
from headrace.actors.runtime.actors.batching import TOGETHER_S, Batcher
from headrace.actors.runtime.actors.nodes import this_node
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.services.figures import ServiceFigures
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.buffer.primitives.timed_span import interval_clock
from headrace.buffer.trajectories.breakdown import OFFER, summed
from headrace.buffer.trajectories.timeline import Timeline
from headrace.buffer.trajectories.types import Cause, Outcome, Purpose, RolloutId, RolloutOrder, RolloutResult
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.attempts import ROLLOUT_ATTEMPT
from headrace.serve.tracing.tracing import describe, start_rollout_span

tracer = trace.get_tracer("headrace.actors.rollouts.worker")

MANY = 8
"""Number of running rollouts at or above which another one is likely to end within `TOGETHER_S`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """An attempt that has ended and whose result is durable in the buffer. `number` counts the attempts that have ended
    on this worker, from 1; `answer` has the details of an evaluation attempt."""

    number: int
    rollout_id: RolloutId
    attempt: int
    outcome: Outcome
    answer: Answer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """Status of a worker. `incarnation` identifies this process; leases of an earlier incarnation no longer have a
    holder. `assignment` identifies the last reset: a caller that holds a different assignment has lost everything that
    it had started here."""

    incarnation: str
    assignment: str
    running: int
    phases: dict[str, int]
    """Number of rollouts in each phase."""
    node: str = ""
    """Ray id of the node of this process; empty without Ray."""
    turns: int | None = None
    """Turns in progress at simulated engines; None with a gateway, which keeps its own count."""
    ended_turns: int | None = None
    """Turns that have ended at simulated engines."""
    services: dict[str, ServiceFigures] = field(default_factory=dict)
    """Figures of each service since the start of this process."""
    oldest: str = ""
    """The attempt that has run longest; empty if none runs."""


class RolloutWorker:
    """Actor that runs rollouts as coroutines in one process."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._incarnation = uuid.uuid4().hex
        self._stack = AsyncExitStack()
        self._running: dict[tuple[RolloutId, int], asyncio.Task[Outcome]] = {}
        self._book = RunningBook(self._incarnation[:8])
        self._offering: set[tuple[RolloutId, int]] = set()
        self._answers: dict[tuple[RolloutId, int], Answer] = {}
        self._occupied: Counter[str] = Counter()
        self._assignment = ""
        self._finished: deque[Finished] = deque()
        self._ends = 0
        """Number of attempts that have ended, across all dispatchers."""
        self._has_finished = asyncio.Event()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self._stack.enter_context(self._parts.observing.spans("worker"))
        self._stations = await enter(WorkerStations(self._parts, self._incarnation))
        self._offer: Batcher[tuple[RolloutOrder, RolloutResult, float], None] = await enter(Batcher(self._offer_many))
        self._known_tasks = self._parts.tasks.load()
        self._group = await enter(asyncio.TaskGroup())
        if self._parts.observing.run_dir is not None:
            self._stack.callback(self._group.create_task(self._book.keep(self._parts.observing.run_dir)).cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel_all()
        await self._stack.aclose()

    async def start(self, orders: list[RolloutOrder], assignment: str) -> None:
        """Start the attempts that are not running yet, and return immediately.

        Nothing starts if `assignment` is outdated: the dispatcher then abandons its orders. Raises LookupError for a
        task or a source that the worker was not given."""
        if assignment != self._assignment:
            return
        for order in orders:
            # Checked first, since a rollout of an unknown task would end this whole process.
            if (order.purpose, order.task_id) not in self._known_tasks:
                raise LookupError(
                    f"rollout {order.rollout_id}: this worker has no {order.purpose} task {order.task_id!r}; "
                    "add it to WorkerParts.tasks"
                )
            self._parts.source_of(order.task_id)
        for order in orders:
            key = (order.rollout_id, order.attempt)
            if key not in self._running:
                task = self._running[key] = self._group.create_task(self._run(order))
                task.add_done_callback(partial(self._ended, key))

    async def finished(self, assignment: str, *, after: int, timeout_s: float) -> list[Finished]:
        """Return the finished attempts numbered above `after`, and discard all others, which the caller has
        acknowledged. Waits up to `timeout_s` for the first one. A caller that lost a reply can ask again.

        Raises ActorLost for any `assignment` but the latest: since then, the process has died unnoticed or has been
        reset, and its attempts are gone."""
        self._require(assignment)
        while self._finished and self._finished[0].number <= after:
            self._finished.popleft()
        if not self._finished:
            self._has_finished.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_finished.wait()
                if len(self._running) >= MANY:
                    # With many rollouts more end soon, and one call refills all their slots.
                    await asyncio.sleep(TOGETHER_S)
        self._require(assignment)
        return list(self._finished)

    def _require(self, assignment: str) -> None:
        if assignment != self._assignment:
            raise ActorLost("the worker process was replaced, or serves another dispatcher")

    async def cancel(self, attempts: list[tuple[RolloutId, int]]) -> None:
        """Cancel attempts, which are then offered as `cancelled`. Unknown attempts are ignored."""
        for key in attempts:
            if key not in self._offering and (task := self._running.get(key)):
                task.cancel()

    async def reset(self) -> WorkerStatus:
        """Serve the caller from now on: cancel all attempts, and drop finished attempts that have not been fetched.
        Returns once all have ended, so that the same attempts can be started again.

        Every call creates a new assignment, even a repeated call or a late one from a dead dispatcher: the dispatcher
        that loses the worker notices this and resets it again."""
        assignment = self._assignment = uuid.uuid4().hex
        # Wakes calls that wait with the previous assignment.
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
            node=this_node(),
            turns=self._stations.turns,
            ended_turns=self._stations.ended_turns,
            services=self._stations.service_figures,
            oldest=self._book.oldest(),
        )

    async def running(self) -> RunningFile:
        """Return what this worker is running, as its file says it."""
        return self._book.file()

    def _cancel_all(self) -> None:
        for key, task in self._running.items():
            if key not in self._offering:
                task.cancel()

    def _ended(self, key: tuple[RolloutId, int], task: asyncio.Task[Outcome]) -> None:
        """Record that an attempt has ended. A task that raises terminates the process anyway."""
        del self._running[key]
        self._offering.discard(key)
        failed = task.cancelled() or task.exception() is not None
        self._book.end(key, scored=not failed and task.result().reward is not None)
        if not task.cancelled() and task.exception() is not None:
            return
        # A task ends as cancelled only if it was cancelled before its first step.
        outcome = CANCELLED if task.cancelled() else task.result()
        answer = self._answers.pop(key, None)
        self._ends += 1
        self._finished.append(
            Finished(number=self._ends, rollout_id=key[0], attempt=key[1], outcome=outcome, answer=answer)
        )
        self._has_finished.set()

    async def _run(self, order: RolloutOrder) -> Outcome:
        # In the context of this rollout's task only.
        ROLLOUT_ATTEMPT.set((order.rollout_id, order.attempt))
        # The group of an answer is its evaluation.
        group = names.EVALUATION_TAG if order.purpose is Purpose.EVALUATION else names.GROUP_ID
        attributes = {names.TASK_ID: order.task_id, names.PURPOSE: order.purpose.value, group: order.group_id}
        run_id = self._parts.observing.run_id
        span = start_rollout_span(tracer, order.rollout_id, order.attempt, attributes, run_id=run_id)
        with trace.use_span(span, end_on_exit=True):
            task, folders = self._known_tasks[order.purpose, order.task_id], self._parts.evaluations
            is_evaluation = order.purpose is Purpose.EVALUATION
            spent = AttemptTime(self._occupied)
            self._book.begin(order, spent)
            spent.labels |= {"worker": self._incarnation[:8], "node": this_node()[:12]}
            if spent.began_at_s is not None:
                spent.labels["load"] = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
            stations = self._stations.of(order.task_id)
            recorded = stations.recorded() if is_evaluation and folders is not None else None
            attempt = RunningAttempt(order, task, recorded or stations, stations.config, spent)
            try:
                result = await attempt.run()
            except asyncio.CancelledError:
                result = attempt.cancelled()
            # From here on a cancellation would only lose the result.
            self._offering.add((order.rollout_id, order.attempt))
            describe(trace.get_current_span(), result.outcome)
            if is_evaluation:
                answer = answer_of(order, result)
                if recorded is not None and folders is not None and answer.cause is not Cause.CANCELLED:
                    answer = await asyncio.to_thread(folders.write, order.group_id, answer, recorded.reports)
                self._answers[order.rollout_id, order.attempt] = answer
            with tracer.start_as_current_span(names.BUFFER_OFFER):
                await self._offer((order, result, spent.now_s()))
            return result.outcome

    async def _offer_many(self, ended: list[tuple[RolloutOrder, RolloutResult, float]]) -> list[None]:
        training = [(result, at_s) for order, result, at_s in ended if order.purpose is Purpose.TRAIN]
        evaluation = [(order, result, at_s) for order, result, at_s in ended if order.purpose is Purpose.EVALUATION]
        # Each repeated call says how long the results have waited by then.
        if training:
            await until_back(lambda: self._parts.replay.offer([_waited(result, at_s) for result, at_s in training]))
        if evaluation:
            await until_back(
                lambda: self._parts.replay.record_evaluations(
                    [(order, _waited(result, at_s)) for order, result, at_s in evaluation]
                )
            )
        return [None] * len(ended)


def _waited(result: RolloutResult, at_s: float) -> RolloutResult:
    """Return a result that has been ready since `at_s`, with the time that it has waited to be taken."""
    breakdown, waited_s = result.breakdown, interval_clock()() - at_s
    if breakdown is None:
        return result
    wall_s, timeline = breakdown.wall_s, Timeline(began_at_s=breakdown.timeline.began_at_s)
    timeline.include(breakdown.timeline)
    timeline.add(Segment(OFFER, wall_s, wall_s + waited_s))
    offered = replace(
        breakdown,
        wall_s=wall_s + waited_s,
        parts_s=summed([*breakdown.parts_s.items(), (OFFER, waited_s)]),
        within_s={**breakdown.within_s, OFFER: (wall_s, wall_s + waited_s)},
        timeline=timeline.settled(),
    )
    return replace(result, breakdown=offered)
