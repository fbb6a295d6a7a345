"""The dispatcher: asks the buffer what may start and hands batches of rollouts to the workers.

Invariants:
- A training rollout starts only when the buffer issued it; the buffer's inventory is the only admission.
- A worker never carries more than `slots_per_worker` training rollouts; evaluations have slots of their own, so they
  overtake only queued work.
- When a worker dies, its training attempts are abandoned (the buffer makes new ones), its evaluations run again, its
  sandboxes are released. It gets nothing before it has answered again: attempts are not burnt on a dead worker.
- Workers do not wait for each other: one that hangs or is away holds up what was handed to it, and nothing else.
- While no engine serves nothing begins: the buffer is told, and evaluations wait.
- An evaluation has a fixed denominator: what stays infra after `evaluation_attempts` is counted apart, never as a
  failure. What the ledger already holds of it is not run again.
- A new dispatcher fences the one before it, at the workers and at the buffer, before it starts anything.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.rollouts.answers import untold_answer
from headrace.actors.rollouts.evaluation_log import Recording, evaluation_order
from headrace.actors.rollouts.pacing import AdaptiveLimit, PacingConfig
from headrace.actors.rollouts.summary import EvaluationSummary, summarize_answers, write_summary
from headrace.actors.runtime.retry import until_back
from headrace.actors.training.replay import NEVER_EVALUATED
from headrace.buffer.primitives.single_flight import SingleFlight
from headrace.buffer.tasks import tasks_digest
from headrace.buffer.types import Cause, GroupId, Outcome, RolloutId, RolloutOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from types import TracebackType

    from headrace.actors.places.sandbox_pool import SandboxPool
    from headrace.actors.rollouts.answers import Answer
    from headrace.actors.rollouts.evaluation_folders import EvaluationFolders
    from headrace.actors.rollouts.pacing import Pressure
    from headrace.actors.rollouts.records import RolloutStore
    from headrace.actors.rollouts.worker import Finished, RolloutWorker
    from headrace.actors.training.replay import Evaluated
    from headrace.buffer.tasks import Task

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""How long one waiting call lasts; nothing depends on it but how soon a cancelled dispatcher notices."""

RECONCILE_S = 60.0
"""How often the buffer is told what is carried, though nothing is known to be lost."""

MOST_AT_ONCE = 128
"""Orders of one call: the first of many are on their way while the others are still issued."""

START_AGAIN_S = 0.2
"""A call that hands out orders and is lost is made again after this time, while the worker lives."""

Attempt = tuple[RolloutId, int]


class DispatcherConfig(BaseModel):
    """How much runs at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots_per_worker: int = Field(default=32, ge=1)
    """Training rollouts one worker carries at a time."""
    evaluation_slots: int = Field(default=24, ge=1)
    """Evaluation rollouts at a time, over all workers."""
    evaluation_attempts: int = Field(default=3, ge=1)
    """Attempts of one evaluation rollout before it is counted as infra."""
    pacing: PacingConfig = PacingConfig()
    """Fewer rollouts in flight while engines or outside services are overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherStatus:
    in_flight: int
    evaluating: int
    finished: int
    scored: int
    """Training rollouts that ended with a reward, since this dispatcher started."""
    answered: int
    """Evaluation rollouts that ended, since this dispatcher started."""
    infra: int
    mean_reward: float | None
    """Mean reward of the last 128 scored training rollouts."""
    limit: int = 0
    """Training rollouts that may be in flight now."""
    slowed_by: str = ""
    """Why the limit shrank last."""


class Engines(Protocol):
    """What the dispatcher asks of the engines."""

    async def serving(self, *, unlike: bool, timeout_s: float) -> bool:
        """Whether one serves, as soon as that is not `unlike`, or after `timeout_s`."""
        ...


@dataclass(slots=True)
class _Slot:
    """What one worker carries."""

    worker: RolloutWorker
    incarnation: str = ""
    """Names its process: what that one leased is released with it."""
    assignment: str = ""
    """Names what it serves us for; with another one all that it carried is gone."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it answers, and serves us."""
    seen: int = 0
    """The number of the last end that this worker told."""
    receiving: int = 0
    """Calls that hand orders over and have not returned: it gets no more meanwhile."""
    cancelling: bool = False
    """A call that cancels attempts has not returned."""
    training: dict[Attempt, None] = field(default_factory=dict)
    """In the order in which they began."""
    evaluations: dict[Attempt, RolloutOrder] = field(default_factory=dict)


class Dispatcher:
    """Keeps the workers busy with what the buffer admits."""

    def __init__(
        self,
        config: DispatcherConfig,
        *,
        replay: RolloutStore,
        pool: SandboxPool,
        workers: Sequence[RolloutWorker],
        evaluations: EvaluationFolders | None = None,
        engines: Engines | None = None,
    ) -> None:
        self._config = config
        self._engines = engines
        self._engines_serve = asyncio.Event()
        self._engines_serve.set()
        self._folders = evaluations
        self._replay = replay
        self._pool = pool
        self._incarnation = uuid.uuid4().hex
        self._slots = [_Slot(worker) for worker in workers]
        self._stack = AsyncExitStack()
        self._slot_freed = asyncio.Event()
        most = config.slots_per_worker * len(workers)
        self._limit = AdaptiveLimit(config.pacing, most, now_s=0.0)
        self._evaluation_slots = asyncio.Semaphore(config.evaluation_slots)
        self._starting: set[asyncio.Task[None]] = set()
        """Orders on their way to a worker."""
        self._answers: dict[Attempt, asyncio.Future[Answer]] = {}
        self._answered = 0
        self._scored = 0
        self._rewards: list[float] = []
        self._ended: dict[Cause, int] = defaultdict(int)

    async def __aenter__(self) -> Self:
        # Whatever is in flight belonged to an earlier dispatcher: nobody would report its end.
        await self._reconcile()
        tasks = self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._training: SingleFlight[None] = SingleFlight(tasks)
        self._evaluations: SingleFlight[EvaluationSummary] = SingleFlight(tasks)
        self._watchers = [tasks.create_task(self._watch(slot)) for slot in self._slots]
        if self._engines is not None:
            self._watchers.append(tasks.create_task(self._watch_engines(self._engines)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (*self._watchers, *self._starting):
            task.cancel()
        self._training.cancel_all()
        self._evaluations.cancel_all()
        await self._stack.aclose()

    async def run(self) -> None:
        """Issue training rollouts until cancelled, or until `stop_training`."""
        await self._training("run", self._train)

    async def stop_training(self) -> None:
        """Issue no more and cancel what trains now; the buffer counts it as cancelled and would issue it again on
        resume."""
        self._training.cancel("run")
        if self._starting:
            # A worker ends only what it has.
            await asyncio.wait(self._starting)
        self._cancel([attempt for slot in self._slots for attempt in slot.training])
        if self._starting:
            await asyncio.wait(self._starting)
        await self._reconcile()

    async def evaluate(self, tasks: Sequence[Task], *, samples: int, tag: str) -> EvaluationSummary:
        """`samples` sampled answers for each task; returns when all are scored or counted as infra. What the ledger has
        under this tag counts; asking again while it runs waits for the same evaluation."""
        return await self._evaluations(tag, lambda: self._evaluate(tasks, samples, tag))

    async def _train(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._issue())
            tasks.create_task(self._cancel_in_vain())

    async def _cancel_in_vain(self) -> None:
        """What cannot be trained any more ends at once, also while no slot is free to ask for orders."""
        told: list[Attempt] = []
        while True:
            vain = await until_back(lambda: self._replay.cancellations(told, timeout_s=POLL_S))  # noqa: B023
            if vain is not None:
                told = list(vain)
                self._cancel(told)

    async def _issue(self) -> None:
        loop = asyncio.get_running_loop()
        reconciled_s = loop.time()
        while True:
            slot = await self._free_slot()
            if loop.time() - reconciled_s > RECONCILE_S:
                # Every order that came is in a slot by now: what the buffer handed out besides was lost.
                await self._reconcile()
                reconciled_s = loop.time()
            room = (self._config.slots_per_worker - len(slot.training), self._limit.limit - self._in_flight)
            free = min(MOST_AT_ONCE, *room)
            try:
                issued = await self._replay.issue(free, self._incarnation, timeout_s=POLL_S)
            except ActorLost:
                await self._reconcile()
                continue
            self._cancel(issued.to_cancel)
            await self._place(list(issued.orders))

    async def _place(self, orders: list[RolloutOrder]) -> None:
        """Hand orders to workers that have room now: the call that issued them took time, and whoever had room then may
        be dead."""
        while orders:
            slot = await self._free_slot()
            room = self._config.slots_per_worker - len(slot.training)
            given, orders = orders[:room], orders[room:]
            slot.training |= dict.fromkeys((order.rollout_id, order.attempt) for order in given)
            self._hand_over(slot, given)

    async def _reconcile(self) -> None:
        """What nobody carries starts again: this dispatcher is new, or the buffer died, perhaps between recording what
        it issued and telling us."""
        carried = [attempt for slot in self._slots for attempt in slot.training]
        await until_back(lambda: self._replay.reconcile(carried, self._incarnation))

    async def _evaluate(self, tasks: Sequence[Task], samples: int, tag: str) -> EvaluationSummary:
        known = await until_back(lambda: self._replay.evaluated(GroupId(tag)))
        async with Recording(self._folders, tag) as recording, asyncio.TaskGroup() as group:
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
        )
        if self._folders is not None:
            await asyncio.to_thread(write_summary, self._folders.summary(tag), summary, self._folders.about)
        return summary

    async def pace(self, pressure: Pressure) -> None:
        """Take a look at the load of engines and outside services: the number in flight follows it."""
        before = self._limit.limit
        if self._limit.look(pressure, self._in_flight, asyncio.get_running_loop().time()) > before:
            self._slot_freed.set()

    async def status(self) -> DispatcherStatus:
        return DispatcherStatus(
            limit=self._limit.limit,
            slowed_by=self._limit.reason,
            in_flight=self._in_flight,
            evaluating=sum(len(slot.evaluations) for slot in self._slots),
            finished=sum(self._ended.values()),
            scored=self._scored,
            answered=self._answered,
            infra=self._ended[Cause.INFRA] + self._ended[Cause.EVALUATOR],
            mean_reward=sum(self._rewards) / len(self._rewards) if self._rewards else None,
        )

    async def _free_slot(self) -> _Slot:
        """The least loaded worker that has room, as soon as there is one."""
        return await self._slot_with(
            lambda slot: len(slot.training),
            room=lambda slot: (
                not slot.receiving
                and len(slot.training) < self._config.slots_per_worker
                and self._in_flight < self._limit.limit
            ),
        )

    @property
    def _in_flight(self) -> int:
        return sum(len(slot.training) for slot in self._slots)

    async def _slot_with(self, load: Callable[[_Slot], int], *, room: Callable[[_Slot], bool]) -> _Slot:
        while True:
            ready = [slot for slot in self._slots if slot.ready.is_set() and room(slot)]
            if ready:
                return min(ready, key=load)
            self._slot_freed.clear()
            await self._slot_freed.wait()

    async def _evaluate_one(
        self, first: RolloutOrder, known: Mapping[RolloutId, Evaluated], recording: Recording
    ) -> Answer:
        """One answer, recorded; without a reward when every attempt was infra."""
        if (recorded := recording.get(first.rollout_id)) is not None:
            return recorded
        before = known.get(first.rollout_id, NEVER_EVALUATED)
        answer = recording.recover(first, before) if before.reward is not None else None
        for attempt in range(before.attempts + 1, before.attempts + 1 + self._config.evaluation_attempts):
            if answer is not None and answer.reward is not None:
                break
            async with self._evaluation_slots:
                await self._engines_serve.wait()
                answer = await self._answer(replace(first, attempt=attempt))
        assert answer is not None
        await recording.add(answer)
        return answer

    async def _answer(self, order: RolloutOrder) -> Answer:
        slot = await self._slot_with(
            lambda slot: len(slot.training) + len(slot.evaluations), room=lambda slot: slot.ready.is_set()
        )
        key = (order.rollout_id, order.attempt)
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        slot.evaluations[key] = order
        try:
            await self._start(slot, [order])
            ended: Answer = await answer
            return ended
        finally:
            self._answers.pop(key, None)
            slot.evaluations.pop(key, None)

    def _hand_over(self, slot: _Slot, orders: list[RolloutOrder]) -> None:
        """`_start`, to its end also when the caller is cancelled: what no worker has would be carried for ever."""
        self._call(self._start(slot, orders))

    def _call(self, work: Coroutine[None, None, None]) -> None:
        """A call to one worker, which nobody else waits for."""
        calling = self._tasks.create_task(work)
        self._starting.add(calling)
        calling.add_done_callback(self._starting.discard)

    async def _start(self, slot: _Slot, orders: list[RolloutOrder]) -> None:
        """Returns when the worker has the orders, or is another one: its watcher gives up all that it carried."""
        assignment = slot.assignment
        slot.receiving += 1
        try:
            while slot.ready.is_set() and slot.assignment == assignment:
                try:
                    await slot.worker.start(orders, assignment)
                except ActorLost:
                    # Dead, or only the call was lost.
                    await asyncio.sleep(START_AGAIN_S)
                else:
                    return
        finally:
            slot.receiving -= 1
            self._slot_freed.set()

    def _cancel(self, attempts: Sequence[Attempt]) -> None:
        """End these where they run. What a worker that does not answer misses is told again with the next orders."""
        for slot in self._slots:
            mine = [attempt for attempt in attempts if attempt in slot.training]
            if mine and not slot.cancelling:
                self._call(self._cancel_at(slot, mine))

    async def _cancel_at(self, slot: _Slot, attempts: list[Attempt]) -> None:
        slot.cancelling = True
        try:
            with suppress(ActorLost):
                await slot.worker.cancel(attempts)
        finally:
            slot.cancelling = False

    async def _watch(self, slot: _Slot) -> None:
        """Take what the worker finished, for ever; notice its death."""
        await self._attend(slot)
        while True:
            try:
                ended = await slot.worker.finished(slot.assignment, after=slot.seen, timeout_s=POLL_S)
                for finished in ended:
                    slot.seen = finished.number
                    self._ends(slot, finished)
            except ActorLost:
                await self._lost(slot)
                await self._attend(slot)

    async def _attend(self, slot: _Slot) -> None:
        """Make a worker ours and empty; it is ready then. However long it is away, others go on: who guards the
        actors ends the run when it does not come back."""
        while True:
            try:
                status = await until_back(lambda: slot.worker.reset())
                break
            except ActorGone as error:
                logger.warning("a worker is still away: %s", error)
        slot.incarnation, slot.assignment = status.incarnation, status.assignment
        slot.seen = 0
        slot.ready.set()
        self._slot_freed.set()

    async def _watch_engines(self, engines: Engines) -> None:
        """Hold what would begin while no engine serves. What a group that is away itself would say is not known: it
        stays as it was, for its engines may serve on."""
        serving = True
        while True:
            told = serving
            try:
                serving = await engines.serving(unlike=told, timeout_s=POLL_S)
            except ActorLost:
                await asyncio.sleep(START_AGAIN_S)
                continue
            if serving:
                self._engines_serve.set()
            else:
                self._engines_serve.clear()
            await until_back(lambda: self._replay.engines(serving=serving))  # noqa: B023

    def _ends(self, slot: _Slot, finished: Finished) -> None:
        key = (finished.rollout_id, finished.attempt)
        if key in slot.training:
            del slot.training[key]
            self._slot_freed.set()
            self._ended[finished.outcome.cause] += 1
            if finished.outcome.reward is not None:
                self._scored += 1
                self._rewards = [*self._rewards[-127:], finished.outcome.reward]
        elif (answer := self._answers.get(key)) and not answer.done():
            self._answered += 1
            answer.set_result(finished.answer or untold_answer(slot.evaluations[key], finished.outcome))

    async def _lost(self, slot: _Slot) -> None:
        """Everything the dead worker carried starts again, here or elsewhere."""
        slot.ready.clear()
        lost, slot.training = list(slot.training), {}
        logger.warning("worker lost with %d rollouts and %d evaluations", len(lost), len(slot.evaluations))
        for key, order in slot.evaluations.items():
            if (answer := self._answers.get(key)) and not answer.done():
                answer.set_result(untold_answer(order, Outcome.infra("the worker died")))
        if lost:
            await until_back(lambda: self._replay.abandon(lost))
        await until_back(lambda: self._pool.release_holder(slot.incarnation))
