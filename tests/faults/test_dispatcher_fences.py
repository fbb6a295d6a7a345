"""What a dead dispatcher left waiting takes nothing from the one that follows: at the buffer, and at a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from benches.orchestration import AT_ONCE, immediate_parts, prepare_directory, without_spans

from headrace.actors.errors import ActorLost
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.rollouts.dispatcher import Dispatcher, DispatcherConfig
from headrace.actors.rollouts.stations import WorkerParts
from headrace.actors.rollouts.worker import RolloutWorker, WorkerStatus
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.training.replay import Replay
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import Outcome, RolloutId, RolloutOrder

WAIT_S = 30.0
HELD_OUT = tuple(
    Task(id=TaskId(f"held-{n}"), family="none", instruction="return", evaluator=NoEvaluator()) for n in range(3)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """Real actors in this process: agents that return at once, in plain processes."""

    runtime: InlineRuntime
    replay: Replay
    pool: SandboxPool
    worker: RolloutWorker
    parts: WorkerParts


@pytest.fixture
async def actors(tmp_path: Path) -> AsyncIterator[Actors]:
    directory = prepare_directory(tmp_path / "run")
    runtime = InlineRuntime()
    async with AsyncExitStack() as stack:

        async def spawn(cls: type, *args: object, name: str, **kwargs: object) -> object:
            actor = await runtime.spawn(cls, *args, name=name, **kwargs)
            stack.push_async_callback(runtime.stop, actor)
            return actor

        buffer = BufferConfig(batch_size=4, group_size=2, max_staleness=1)
        replay = await spawn(Replay, buffer, directory=directory, seed=0, name="replay")
        await replay.open_epoch(None)
        pool = await spawn(SandboxPool, AT_ONCE, directory=directory, name="pool")
        catalog = TaskCatalog(train=directory.train_tasks, evaluation=HELD_OUT)
        evaluator = await spawn(Evaluator, pool, without_spans(directory), catalog, name="evaluator")
        parts = immediate_parts(directory, replay, pool, evaluator)
        parts = replace(parts, tasks=catalog)
        worker = await spawn(RolloutWorker, parts, name="worker")
        yield Actors(runtime=runtime, replay=replay, pool=pool, worker=worker, parts=parts)


async def test_orders_awaited_by_a_dead_dispatcher_are_never_issued(actors: Actors) -> None:
    replay = actors.replay
    first = await replay.issue(8, "dead", timeout_s=1)
    assert len(first.orders) == 8, "all there is room for"
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(WAIT_S):
        waiting = tasks.create_task(replay.issue(8, "dead", timeout_s=WAIT_S))
        await asyncio.wait([waiting], timeout=0.2)
        assert await replay.reconcile([], "next") == 8
        assert (await waiting).orders == ()
    assert (await replay.issue(8, "dead", timeout_s=1)).orders == ()
    again = await replay.issue(8, "next", timeout_s=1)
    assert {order.rollout_id for order in again.orders} == {order.rollout_id for order in first.orders}
    assert {order.attempt for order in again.orders} == {2}
    assert (await replay.status()).inventory.in_flight == 8
    assert await replay.reconcile([], "third") == 8, "also when the last order is long given out"


async def test_results_go_only_to_the_dispatcher_that_the_worker_serves(actors: Actors) -> None:
    worker, replay = actors.worker, actors.replay
    dead = (await worker.reset()).assignment
    orders = list((await replay.issue(3, "next", timeout_s=1)).orders)
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(WAIT_S):
        orphan = tasks.create_task(raises_actor_lost(worker.finished(dead, after=0, timeout_s=WAIT_S)))
        await asyncio.wait([orphan], timeout=0.2)
        assignment = (await worker.reset()).assignment
        await orphan
        await worker.start(orders, assignment)
        ended: set[tuple[RolloutId, int]] = set()
        seen = 0
        while len(ended) < 3:
            finished = await worker.finished(assignment, after=seen, timeout_s=WAIT_S)
            lost = await worker.finished(assignment, after=seen, timeout_s=WAIT_S)
            assert lost[: len(finished)] == finished, "whoever lost an answer asks again"
            seen = finished[-1].number
            ended |= {(item.rollout_id, item.attempt) for item in finished}
        await raises_actor_lost(worker.finished(dead, after=0, timeout_s=WAIT_S))
    assert ended == {(order.rollout_id, order.attempt) for order in orders}
    assert (await worker.status()).running == 0


async def raises_actor_lost(call: Awaitable[object]) -> None:
    with pytest.raises(ActorLost):
        await call


async def test_orders_for_an_outdated_assignment_are_not_started(actors: Actors) -> None:
    await actors.worker.reset()
    await actors.worker.start(list((await actors.replay.issue(2, "next", timeout_s=1)).orders), "an earlier one")
    assert (await actors.worker.status()).running == 0


async def until_finished(dispatcher: Dispatcher, count: int) -> None:
    """Wait until so many rollouts have ended, at most half of the time of a test."""
    deadline_s = time.monotonic() + WAIT_S / 2
    while (status := await dispatcher.status()).finished < count and time.monotonic() < deadline_s:  # noqa: ASYNC110 - the dispatcher has no event for it
        await asyncio.sleep(0.05)
    assert status.finished >= count, status


class Waits(RolloutWorker):
    """Its first orders never end by themselves."""

    begun = 0

    async def _run(self, order: RolloutOrder) -> Outcome:
        self.begun += 1
        if self.begun <= 2:
            await asyncio.Event().wait()
        return await super()._run(order)


async def test_a_repeated_reset_leaks_no_slots(actors: Actors) -> None:
    """The second time the worker carries orders. Their slots were taken for ever: the end of none was ever told."""
    worker = await actors.runtime.spawn(Waits, actors.parts, name="waits")
    try:
        async with (
            asyncio.timeout(WAIT_S),
            Dispatcher(
                DispatcherConfig(slots_per_worker=2), replay=actors.replay, pool=actors.pool, workers=[worker]
            ) as dispatcher,
            asyncio.TaskGroup() as tasks,
        ):
            running = tasks.create_task(dispatcher.run())
            while worker.begun < 2:  # noqa: ASYNC110 - as an operator asks
                await asyncio.sleep(0.05)
            await worker.reset()
            await until_finished(dispatcher, 6)
            assert worker.begun >= 6, "others ran in the slots of the two that never ended"
            running.cancel()
    finally:
        await actors.runtime.stop(worker)


async def test_a_new_dispatcher_resumes_an_evaluation_from_the_ledger(actors: Actors) -> None:
    dispatchers = [
        Dispatcher(
            DispatcherConfig(slots_per_worker=4), replay=actors.replay, pool=actors.pool, workers=[actors.worker]
        )
        for _ in range(2)
    ]
    async with asyncio.timeout(WAIT_S):
        async with dispatchers[0] as first, asyncio.TaskGroup() as calls:
            once, again = (calls.create_task(first.evaluate(HELD_OUT[:2], samples=2, tag="base")) for _ in range(2))
            assert (await once).answers == (await again).answers == 4
        known = (await actors.replay.status()).evaluations
        assert known == 4, "two calls, one evaluation"
        async with dispatchers[1] as second:
            summary = await second.evaluate(HELD_OUT, samples=2, tag="base")
    assert (summary.answers, summary.infra, summary.success) == (6, 0, 1.0)
    assert (await actors.replay.status()).evaluations == 6, "only the missing ones were run"


class LosesItsFirstOrders(RolloutWorker):
    """The first call that hands it orders never arrives, and it lives on."""

    lost = False

    async def start(self, orders: list[RolloutOrder], assignment: str) -> None:
        if not self.lost:
            self.lost = True
            raise ActorLost("the call was lost on its way")
        await super().start(orders, assignment)


async def test_orders_lost_in_transit_to_a_live_worker_are_sent_again(actors: Actors) -> None:
    worker = await actors.runtime.spawn(LosesItsFirstOrders, actors.parts, name="worker")
    try:
        config = DispatcherConfig(slots_per_worker=4)
        async with (
            asyncio.timeout(WAIT_S),
            Dispatcher(config, replay=actors.replay, pool=actors.pool, workers=[worker]) as dispatcher,
        ):
            summary = await dispatcher.evaluate(HELD_OUT[:1], samples=1, tag="base")
    finally:
        await actors.runtime.stop(worker)
    assert worker.lost
    assert (summary.answers, summary.infra) == (1, 0)


class Hangs(RolloutWorker):
    """Answers nothing from the call of this name on."""

    call = ""

    async def _stop_at(self, name: str) -> None:
        if name == self.call:
            await asyncio.Event().wait()

    async def start(self, orders: list[RolloutOrder], assignment: str) -> None:
        await self._stop_at("start")
        await super().start(orders, assignment)

    async def reset(self) -> WorkerStatus:
        await self._stop_at("reset")
        return await super().reset()


@pytest.mark.parametrize("call", ["start", "reset"])
async def test_a_hung_worker_does_not_delay_orders_to_others(actors: Actors, call: str) -> None:
    worker = await actors.runtime.spawn(Hangs, actors.parts, name="hangs")
    worker.call = call
    try:
        config = DispatcherConfig(slots_per_worker=2)
        async with (
            asyncio.timeout(WAIT_S),
            Dispatcher(config, replay=actors.replay, pool=actors.pool, workers=[worker, actors.worker]) as dispatcher,
            asyncio.TaskGroup() as tasks,
        ):
            running = tasks.create_task(dispatcher.run())
            await until_finished(dispatcher, 6)
            running.cancel()
    finally:
        await actors.runtime.stop(worker)
