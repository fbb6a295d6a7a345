"""The slots of the rollout workers: the attempts that each worker carries, and all calls to workers.

Invariants:
- A worker never carries more than `slots_per_worker` training rollouts, and all workers together never more than the
  adaptive limit.
- When a worker dies, its training attempts are abandoned (the buffer creates new ones), its evaluations end as infra,
  and its sandboxes are released. It receives no orders until it has answered again, so a dead worker uses up no
  attempts.
- A worker whose node is drained receives no orders. Another process that takes its place does.
- Workers do not wait for each other: a worker that hangs or is unavailable delays only its own orders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.rollouts.answers import Answer, answer_without_record
from headrace.actors.rollouts.pacing import AdaptiveLimit, Pressure
from headrace.actors.rollouts.records import RolloutStore
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.buffer.trajectories.types import Outcome, RolloutId, RolloutOrder

if TYPE_CHECKING:
    from headrace.actors.rollouts.worker import RolloutWorker

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Timeout of one long-polling call; it only bounds how quickly a cancelled dispatcher notices."""
RETRY_S = 0.2
"""Delay before a lost call is repeated while its actor is alive."""

Attempt = tuple[RolloutId, int]


@dataclass(slots=True)
class WorkerSlot:
    """Attempts that one worker carries."""

    worker: RolloutWorker
    incarnation: str = ""
    """Identifies the worker's process; its sandboxes are released under this name."""
    node: str = ""
    """Node of the worker's process."""
    held: str = ""
    """Incarnation that receives no orders, because its node is drained."""
    assignment: str = ""
    """Identifies the worker's last reset; a new assignment means that everything the worker carried is gone."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the worker is reachable and serving this dispatcher."""
    seen: int = 0
    """Number of the latest finished attempt that this worker has reported."""
    receiving: int = 0
    """Number of pending calls that hand over orders; the worker receives no further orders while there are any."""
    cancelling: bool = False
    """True while a call that cancels attempts is pending."""
    training: dict[Attempt, None] = field(default_factory=dict)
    """Training attempts, in start order."""
    evaluations: dict[Attempt, RolloutOrder] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """True if the worker may receive orders."""
        return self.ready.is_set() and self.held != self.incarnation

    @property
    def carried(self) -> list[Attempt]:
        return [*self.training, *self.evaluations]


class WorkerSlots:
    """Slots of all workers. `trained` is called with the outcome of every training attempt."""

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        *,
        slots_per_worker: int,
        limit: AdaptiveLimit,
        replay: RolloutStore,
        pool: SandboxPool,
        trained: Callable[[Outcome], None],
    ) -> None:
        self._slots = [WorkerSlot(worker) for worker in workers]
        self._slots_per_worker = slots_per_worker
        self.limit = limit
        self._replay = replay
        self._pool = pool
        self._trained = trained
        self._freed = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        """Pending calls to workers that run in the background."""
        self._answers: dict[Attempt, asyncio.Future[Answer]] = {}
        self.answered = 0
        """Number of evaluation attempts that have ended."""

    def watch(self, tasks: asyncio.TaskGroup) -> None:
        """Start watching all workers, using tasks in this group."""
        self._tasks = tasks
        self._watchers = [tasks.create_task(self._watch(slot)) for slot in self._slots]

    def stop(self) -> None:
        """Cancel all calls to workers."""
        for task in (*self._watchers, *self._calls):
            task.cancel()

    @property
    def in_flight(self) -> int:
        """Number of training attempts that workers are carrying."""
        return sum(len(slot.training) for slot in self._slots)

    @property
    def evaluating(self) -> int:
        """Number of evaluation attempts that workers are carrying."""
        return sum(len(slot.evaluations) for slot in self._slots)

    @property
    def carried(self) -> list[Attempt]:
        """Training attempts that workers are carrying."""
        return [attempt for slot in self._slots for attempt in slot.training]

    def room(self, slot: WorkerSlot) -> int:
        """Number of training attempts that a worker can still take, disregarding the adaptive limit."""
        return self._slots_per_worker - len(slot.training)

    def hold(self, node: str) -> list[WorkerSlot]:
        """Give no further orders to the workers on a node, until other processes take their places. Return their slots.
        Idempotent."""
        there = [slot for slot in self._slots if slot.node == node and slot.ready.is_set()]
        for slot in there:
            slot.held = slot.incarnation
        return there

    async def emptied(self, slots: Sequence[WorkerSlot], *, timeout_s: float) -> bool:
        """Wait until these workers carry nothing; return False after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(slot.carried for slot in slots):
                    self._freed.clear()
                    await self._freed.wait()
        return not any(slot.carried for slot in slots)

    def pace(self, pressure: Pressure) -> None:
        """Adapt the limit to the load on engines and outside services."""
        before = self.limit.limit
        if self.limit.look(pressure, self.in_flight, asyncio.get_running_loop().time()) > before:
            self._freed.set()

    async def free(self) -> WorkerSlot:
        """Wait until a worker has room for training attempts, and return the least loaded one."""
        return await self._slot_with(
            lambda slot: len(slot.training),
            room=lambda slot: not slot.receiving and self.room(slot) > 0 and self.in_flight < self.limit.limit,
        )

    def train(self, slot: WorkerSlot, orders: list[RolloutOrder]) -> None:
        """Hand training orders to a worker. The call continues if the caller is cancelled: otherwise, attempts that no
        worker has would occupy slots forever."""
        slot.training |= dict.fromkeys((order.rollout_id, order.attempt) for order in orders)
        self._call(self._start(slot, orders))

    async def evaluate(self, order: RolloutOrder) -> Answer:
        """Run an evaluation attempt on the least loaded worker."""
        slot = await self._slot_with(
            lambda slot: len(slot.training) + len(slot.evaluations), room=lambda slot: slot.is_ready
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
            self._freed.set()

    def cancel(self, attempts: Sequence[Attempt]) -> None:
        """Cancel attempts on their workers. Attempts of a worker with a pending cancel call are skipped; the buffer
        lists them again with the next orders."""

        async def cancel_at(slot: WorkerSlot, attempts: list[Attempt]) -> None:
            slot.cancelling = True
            try:
                with suppress(ActorLost):
                    await slot.worker.cancel(attempts)
            finally:
                slot.cancelling = False

        for slot in self._slots:
            mine = [attempt for attempt in attempts if attempt in slot.training or attempt in slot.evaluations]
            if mine and not slot.cancelling:
                self._call(cancel_at(slot, mine))

    async def calls_ended(self) -> None:
        """Wait until the current calls to workers have ended."""
        if self._calls:
            await asyncio.wait(self._calls)

    def _call(self, work: Coroutine[None, None, None]) -> None:
        calling = self._tasks.create_task(work)
        self._calls.add(calling)
        calling.add_done_callback(self._calls.discard)

    async def _slot_with(self, load: Callable[[WorkerSlot], int], *, room: Callable[[WorkerSlot], bool]) -> WorkerSlot:
        while True:
            ready = [slot for slot in self._slots if slot.is_ready and room(slot)]
            if ready:
                return min(ready, key=load)
            self._freed.clear()
            await self._freed.wait()

    async def _start(self, slot: WorkerSlot, orders: list[RolloutOrder]) -> None:
        """Return once the worker has the orders, or has died or been reset. In the latter cases its watcher abandons
        everything that it carried."""
        assignment = slot.assignment
        slot.receiving += 1
        try:
            while slot.ready.is_set() and slot.assignment == assignment:
                try:
                    await slot.worker.start(orders, assignment)
                except ActorLost:
                    # The worker died, or only the call was lost.
                    await asyncio.sleep(RETRY_S)
                else:
                    return
        finally:
            slot.receiving -= 1
            self._freed.set()

    async def _watch(self, slot: WorkerSlot) -> None:
        """Collect a worker's finished attempts forever, and handle its death."""
        await self._attend(slot)
        while True:
            try:
                ended = await slot.worker.finished(slot.assignment, after=slot.seen, timeout_s=POLL_S)
            except ActorLost:
                await self._abandon(slot)
                await self._attend(slot)
                continue
            for finished in ended:
                slot.seen = finished.number
                key = (finished.rollout_id, finished.attempt)
                if key in slot.training:
                    del slot.training[key]
                    self._freed.set()
                    self._trained(finished.outcome)
                elif (answer := self._answers.get(key)) and not answer.done():
                    self.answered += 1
                    order = slot.evaluations[key]
                    answer.set_result(finished.answer or answer_without_record(order, finished.outcome))

    async def _attend(self, slot: WorkerSlot) -> None:
        """Reset a worker for this dispatcher. Waits for as long as the worker is unavailable; the actor guard ends the
        run if the worker does not come back."""
        while True:
            try:
                status = await until_back(lambda: slot.worker.reset())
                break
            except ActorGone as error:
                logger.warning("a worker is still unavailable: %s", error)
        slot.incarnation, slot.assignment, slot.node = status.incarnation, status.assignment, status.node
        slot.seen = 0
        slot.ready.set()
        self._freed.set()

    async def _abandon(self, slot: WorkerSlot) -> None:
        """Abandon everything that a dead worker carried; the work restarts, here or elsewhere."""
        slot.ready.clear()
        lost, slot.training = list(slot.training), {}
        logger.warning("worker lost with %d rollouts and %d evaluations", len(lost), len(slot.evaluations))
        for key, order in slot.evaluations.items():
            if (answer := self._answers.get(key)) and not answer.done():
                answer.set_result(answer_without_record(order, Outcome.infra("the worker died")))
        if lost:
            await until_back(lambda: self._replay.abandon(lost))
        await until_back(lambda: self._pool.release_holder(slot.incarnation))
