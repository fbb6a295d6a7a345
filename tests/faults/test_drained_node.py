"""The drain of a node: its workers get no orders, their rollouts end there or elsewhere, and none counts as failed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from benches.orchestration import AT_ONCE, immediate_parts, prepare_directory, without_spans

from headrace.actors.agents.programs.agent import AgentReport, ImmediateAgent
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.rollouts.dispatcher import Dispatcher, DispatcherConfig
from headrace.actors.rollouts.stations import WorkerParts
from headrace.actors.rollouts.worker import RolloutWorker, WorkerStatus
from headrace.actors.run.node_drain import leave_node
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.training.replay import Replay
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import RolloutId
from headrace.serve.tracing.attempts import ROLLOUT_ATTEMPT

WAIT_S = 30.0
HELD_OUT = (Task(id=TaskId("held"), family="none", instruction="return", evaluator=NoEvaluator()),)


class Waits(ImmediateAgent):
    """An agent that waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.begun: asyncio.Queue[tuple[RolloutId, int]] = asyncio.Queue()

    async def run(self, **given: Any) -> AgentReport:
        attempt = ROLLOUT_ATTEMPT.get()
        assert attempt is not None
        self.begun.put_nowait((RolloutId(attempt[0]), attempt[1]))
        await self.go.wait()
        return await super().run(**given)


class OnNode(RolloutWorker):
    """A worker on a node."""

    def __init__(self, parts: WorkerParts, node: str) -> None:
        self.agent = Waits()
        super().__init__(replace(parts, sources={"": replace(parts.sources[""], agent=self.agent)}))
        self.node = node

    async def status(self) -> WorkerStatus:
        return replace(await super().status(), node=self.node)

    async def is_replaced(self) -> None:
        """Become another process, for its dispatcher."""
        self._incarnation = uuid.uuid4().hex
        await self.reset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    replay: Replay
    dispatcher: Dispatcher
    here: OnNode
    elsewhere: OnNode


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    directory, runtime = prepare_directory(tmp_path / "run"), InlineRuntime()
    async with AsyncExitStack() as stack:

        async def spawn(cls: type, *args: object, **kwargs: object) -> Any:
            actor = await runtime.spawn(cls, *args, name=cls.__name__, **kwargs)
            stack.push_async_callback(runtime.stop, actor)
            return actor

        buffer = BufferConfig(batch_size=4, group_size=2, max_staleness=1)
        replay = await spawn(Replay, buffer, directory=directory, seed=0)
        await replay.open_epoch(None)
        pool = await spawn(SandboxPool, AT_ONCE, directory=directory)
        catalog = TaskCatalog(train=directory.train_tasks, evaluation=HELD_OUT)
        evaluator = await spawn(Evaluator, pool, without_spans(directory), catalog)
        parts = immediate_parts(directory, replay, pool, evaluator)
        parts = replace(parts, tasks=catalog)
        here, elsewhere = await spawn(OnNode, parts, "n1"), await spawn(OnNode, parts, "n2")
        config = DispatcherConfig(slots_per_worker=2)
        async with Dispatcher(config, replay=replay, pool=pool, workers=[here, elsewhere]) as dispatcher:
            yield Run(replay=replay, dispatcher=dispatcher, here=here, elsewhere=elsewhere)


async def first(worker: OnNode, count: int) -> list[tuple[RolloutId, int]]:
    async with asyncio.timeout(WAIT_S):
        return [await worker.agent.begun.get() for _ in range(count)]


async def test_rollouts_end_before_the_deadline_and_no_new_ones_start(run: Run) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.dispatcher.run())
        await first(run.here, 2)
        leaving = tasks.create_task(run.dispatcher.leave_node("n1", deadline_s=WAIT_S))
        assert not (await asyncio.wait([leaving], timeout=0.2))[0], "two rollouts are there"
        run.here.agent.go.set()
        left = await leaving
        assert (left.workers, left.ended, left.cancelled) == (1, 2, 0)
        run.elsewhere.agent.go.set()
        # As many as the buffer has room for.
        await first(run.elsewhere, 3)
        assert run.here.agent.begun.empty()
        assert await run.dispatcher.leave_node("n1", deadline_s=0) == replace(left, ended=0), "again"
        running.cancel()
    assert (await run.dispatcher.status()).infra == 0


async def test_rollouts_that_do_not_end_in_time_are_issued_elsewhere(run: Run) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.dispatcher.run())
        mine = {rollout for rollout, _ in await first(run.here, 2)}
        await first(run.elsewhere, 2)
        run.elsewhere.agent.go.set()
        left = await run.dispatcher.leave_node("n1", deadline_s=0.05)
        assert (left.ended, left.cancelled) == (0, 2)
        again = {}
        while not mine <= again.keys():
            [(rollout, attempt)] = await first(run.elsewhere, 1)
            again[rollout] = attempt
        assert {again[rollout] for rollout in mine} == {2}
        running.cancel()
    assert (await run.dispatcher.status()).infra == 0


async def test_an_evaluation_goes_on_elsewhere(run: Run) -> None:
    async with asyncio.TaskGroup() as tasks:
        evaluating = tasks.create_task(run.dispatcher.evaluate(HELD_OUT, samples=1, tag="base"))
        await first(run.here, 1)
        run.elsewhere.agent.go.set()
        assert (await run.dispatcher.leave_node("n1", deadline_s=0.05)).cancelled == 1
        async with asyncio.timeout(WAIT_S):
            summary = await evaluating
    assert (summary.answers, summary.infra) == (1, 0)


async def test_another_process_in_the_place_of_the_worker_gets_orders(run: Run) -> None:
    run.here.agent.go.set()
    run.elsewhere.agent.go.set()
    await run.dispatcher.leave_node("n1", deadline_s=WAIT_S)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.dispatcher.run())
        await first(run.elsewhere, 2)
        assert run.here.agent.begun.empty()
        await run.here.is_replaced()
        await first(run.here, 1)
        running.cancel()


async def test_a_node_without_actors_of_the_run_is_left_at_once(run: Run) -> None:
    left = await leave_node("n3", "10.0.0.3", dispatcher=run.dispatcher, engines=None, learner=None, deadline_s=WAIT_S)
    assert left.is_nothing
