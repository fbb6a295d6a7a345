"""Evaluations of the dispatcher, with real actors in this process and agents that need no policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from benches.orchestration import AT_ONCE, immediate_parts, prepare_directory, without_spans

from headrace.actors.agents.programs.agent import AgentReport, AgentSession, StopReason
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.rollouts.answers import answer_id, read_answers
from headrace.actors.rollouts.dispatcher import Dispatcher, DispatcherConfig
from headrace.actors.rollouts.evaluation_folders import EvaluationFolders, evaluation_order
from headrace.actors.rollouts.records import EvaluationRecords, RolloutStore
from headrace.actors.rollouts.stations import WorkerParts
from headrace.actors.rollouts.summary import About
from headrace.actors.rollouts.worker import RolloutWorker
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId, tasks_digest, write_tasks
from headrace.buffer.trajectories.types import Purpose
from headrace.sandboxes.base import HostFolder, Sandbox
from headrace.sandboxes.pool.pool import PoolConfig

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30.0


@dataclass
class HeldBack:
    """An agent that works on training tasks until it is let go, fails on tasks that say so, and ends at once on all
    others."""

    started: int = 0
    attempts: dict[str, int] = field(default_factory=dict)
    has_started: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        self.attempts[task.id] = self.attempts.get(task.id, 0) + 1
        if task.instruction == "break":
            raise RuntimeError("the agent's program is missing")
        if task.instruction == "break once" and self.attempts[task.id] == 1:
            raise RuntimeError("the network failed")
        if task.id.startswith("none-"):
            self.started += 1
            self.has_started.set()
            await self.let_go.wait()
        return AgentReport(stop=StopReason.FINISHED, turns=0)


@dataclass(frozen=True, kw_only=True)
class Actors:
    runtime: InlineRuntime
    directory: RunDirectory
    replay: RolloutStore
    pool: SandboxPool
    worker: RolloutWorker
    folders: EvaluationFolders
    agent: HeldBack

    def dispatcher(self, **changes: int) -> Dispatcher:
        config = DispatcherConfig(slots_per_worker=4, evaluation_slots=2).model_copy(update=changes)
        return Dispatcher(config, replay=self.replay, pool=self.pool, workers=[self.worker], evaluations=self.folders)


@asynccontextmanager
async def opened(path: Path, tasks: Sequence[Task] = (), *, trains: bool = True) -> AsyncIterator[Actors]:
    directory = prepare_directory(path)
    runtime, agent = InlineRuntime(), HeldBack()
    folders = EvaluationFolders(root=path / "evaluations", about=About(model="m", recipe_sha256="r"))
    async with AsyncExitStack() as stack:

        async def spawn(cls: type, *args: object, name: str, **kwargs: object) -> object:
            actor = await runtime.spawn(cls, *args, name=name, **kwargs)
            stack.push_async_callback(runtime.stop, actor)
            return actor

        if trains:
            buffer = BufferConfig(batch_size=4, group_size=2, max_staleness=1)
            replay = await spawn(Replay, buffer, directory=directory, seed=0, name="replay")
            await replay.open_epoch(None)
        else:
            replay = await spawn(EvaluationRecords, name="records")
        section = AT_ONCE.model_copy(update={"pool": PoolConfig(max_live=12, evaluation_reserve=2)})
        pool = await spawn(SandboxPool, section, directory=directory, name="pool")
        catalog = TaskCatalog(train=directory.train_tasks, evaluation=tuple(tasks))
        evaluator = await spawn(Evaluator, pool, without_spans(directory), catalog, name="evaluator")
        parts: WorkerParts = immediate_parts(directory, replay, pool, evaluator)
        parts = replace(
            parts,
            sources={"": replace(parts.sources[""], agent=agent)},
            evaluations=folders,
            tasks=catalog,
        )
        worker = await spawn(RolloutWorker, parts, name="worker")
        yield Actors(
            runtime=runtime,
            directory=directory,
            replay=replay,
            pool=pool,
            worker=worker,
            folders=folders,
            agent=agent,
        )


def held_out(*instructions: str) -> list[Task]:
    spec = NoEvaluator()
    return [
        Task(id=TaskId(f"../held {n}"), family="none", instruction=instruction, evaluator=spec)
        for n, instruction in enumerate(instructions)
    ]


async def test_every_answer_has_a_line_and_infra_failures_are_counted_separately(tmp_path: Path) -> None:
    tasks = held_out("return", "break", "break once")
    async with opened(tmp_path / "run", tasks) as actors, actors.dispatcher() as dispatcher, asyncio.timeout(WAIT_S):
        summary = await dispatcher.evaluate(tasks, samples=1, tag="base")
    assert (summary.answers, summary.infra, summary.success) == (3, 1, 1.0)
    answers = {answer.task_id: answer for answer in read_answers(actors.folders.results("base"))}
    assert set(answers) == {task.id for task in tasks}
    assert [answers[task.id].attempt for task in tasks] == [1, 3, 2]
    broken = answers[tasks[1].id]
    assert (broken.reward, broken.cause) == (None, "infra")
    assert "the agent's program is missing" in broken.detail
    document = json.loads(actors.folders.summary("base").read_bytes())
    assert (document["n"], document["n_infra"], document["success"]) == (3, 1, 1.0)
    assert (document["dataset_sha256"], document["model"]) == (tasks_digest(tasks), "m")
    for answer in answers.values():
        metadata = json.loads((actors.folders.rollout("base", answer.folder) / "metadata.json").read_bytes())
        assert (metadata["attempt"], metadata["cause"]) == (answer.attempt, answer.cause)
        assert dict(answer.phases_s).keys() >= {"queue", "boot", "prepare", "agent"}
    assert sorted(path.name for path in (tmp_path / "run" / "evaluations").iterdir()) == ["base"]


@pytest.mark.parametrize("trains", [True, False])
async def test_a_new_dispatcher_does_not_repeat_finished_rollouts(tmp_path: Path, trains: bool) -> None:
    tasks = held_out("return", "break", "return")
    async with opened(tmp_path / "run", tasks, trains=trains) as actors, asyncio.timeout(WAIT_S):
        async with actors.dispatcher() as first:
            before = await first.evaluate(tasks, samples=2, tag="base")
        ran = dict(actors.agent.attempts)
        lines = actors.folders.results("base").read_bytes()
        actors.folders.summary("base").unlink()
        async with actors.dispatcher() as second:
            assert await second.evaluate(tasks, samples=2, tag="base") == before
        assert actors.folders.results("base").read_bytes() == lines
        assert actors.agent.attempts == ran
        assert actors.folders.summary("base").exists()
        # The ledger has what the file has lost; what nobody has is run again.
        kept, lost = lines.splitlines(keepends=True)[:2], lines.splitlines(keepends=True)[2:]
        actors.folders.results("base").write_bytes(b"".join(kept) + lost[0][:20])
        async with actors.dispatcher() as third:
            assert await third.evaluate(tasks, samples=2, tag="base") == before
    again = read_answers(actors.folders.results("base"))
    assert len({answer.rollout_id for answer in again}) == len(again) == 6
    for task in tasks:
        if task.instruction == "return":
            assert actors.agent.attempts[task.id] == ran[task.id], "solved ones come from the records"


async def test_an_evaluation_uses_no_training_slot_inventory_or_batch(tmp_path: Path) -> None:
    tasks = held_out("return", "return")
    async with opened(tmp_path / "run", tasks) as actors, actors.dispatcher() as dispatcher, asyncio.timeout(WAIT_S):
        replay = actors.replay
        assert isinstance(replay, Replay)
        async with asyncio.TaskGroup() as group:
            training = group.create_task(dispatcher.run())
            while actors.agent.started < 4:
                actors.agent.has_started.clear()
                await actors.agent.has_started.wait()
            before = await replay.status()
            summary = await dispatcher.evaluate(tasks, samples=3, tag="step-1")
            during, status = await replay.status(), await dispatcher.status()
            actors.agent.let_go.set()
            await dispatcher.stop_training()
            training.cancel()
    assert (summary.answers, summary.infra) == (6, 0), "it overtook what was queued, and waited for nobody"
    assert (status.in_flight, status.finished) == (4, 0), "no training rollout was cancelled for it"
    assert actors.agent.started >= 4
    assert (during.inventory, during.rollouts, during.evaluations - before.evaluations) == (
        before.inventory,
        before.rollouts,
        6,
    )
    evidence = read_evidence(actors.directory.path)
    assert not [rollout for rollout in evidence.rollouts if rollout.rollout_id.startswith("step-1")]


async def test_a_cancelled_attempt_still_has_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.actors.rollouts.dispatcher.EVALUATION_ATTEMPTS", 1)
    task = replace(held_out("wait")[0], id=TaskId("none-held"))
    async with (
        opened(tmp_path / "run", [task]) as actors,
        actors.dispatcher() as dispatcher,
        asyncio.timeout(WAIT_S),
        asyncio.TaskGroup() as group,
    ):
        evaluating = group.create_task(dispatcher.evaluate([task], samples=1, tag="base"))
        await actors.agent.has_started.wait()
        await actors.worker.cancel([(answer_id("base", task.id, 0), 1)])
        summary = await evaluating
    assert (summary.answers, summary.infra) == (1, 1)
    [answer] = read_answers(actors.folders.results("base"))
    assert (answer.cause, answer.reward) == ("cancelled", None)


def test_a_catalog_distinguishes_tasks_with_the_same_id_by_purpose(tmp_path: Path) -> None:
    train, evaluation = held_out("train"), held_out("evaluate")
    write_tasks(tmp_path / "train.jsonl", train)
    tasks = TaskCatalog(train=tmp_path / "train.jsonl", evaluation=evaluation).load()
    assert tasks == {(Purpose.TRAIN, train[0].id): train[0], (Purpose.EVALUATION, train[0].id): evaluation[0]}


async def test_a_worker_refuses_orders_for_unknown_tasks(tmp_path: Path) -> None:
    [known] = held_out("return")
    async with opened(tmp_path / "run", [known], trains=False) as actors:
        assignment = (await actors.worker.reset()).assignment
        orders = [evaluation_order("base", task_id, 0) for task_id in (known.id, TaskId("unknown"))]
        with pytest.raises(LookupError, match=r"no evaluation task 'unknown'.*WorkerParts\.tasks"):
            await actors.worker.start(orders, assignment)
        assert (await actors.worker.status()).running == 0
