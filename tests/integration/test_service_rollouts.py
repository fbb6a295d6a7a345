"""Rollouts that a reward server and a judge score, through the stations of a worker, in real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.agents.registry.config import ShellAgentConfig
from headrace.actors.agents.registry.registry import shell_agent
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.rollouts.rollout import RolloutConfig, RunningAttempt
from headrace.actors.rollouts.stations import SourceParts, WorkerParts, WorkerStations
from headrace.actors.runtime.pools.config import SandboxSection
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.services.config import RetrySection, ServiceConfig, ServiceKind
from headrace.actors.training.replay import Replay
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.tasks.evaluators import (
    EvaluatorPart,
    EvaluatorSpec,
    HttpEvaluator,
    JudgeEvaluator,
    NoEvaluator,
    RewardMap,
    StateEvaluator,
    SumEvaluator,
)
from headrace.buffer.tasks.parts import JudgeSpec
from headrace.buffer.tasks.task import Task, TaskId, write_tasks
from headrace.buffer.trajectories.types import Cause, GroupId, RolloutId, RolloutOrder, RolloutResult
from headrace.policies.engine import EngineId
from headrace.serve.gateway.capture.session import Budgets, Sampling, TrainedPart
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import agent_rig as rigs
from support.scripted_service import ScriptedService, completion, silent
from support.scripted_service import json as answer_with

pytestmark = pytest.mark.namespaces

WROTE_42 = StateEvaluator(check="import sys; sys.exit(open('/workspace/answer').read() != '42\\n')")
HTTP = HttpEvaluator(service="grader", rewards=RewardMap(solved=2.0, failed=-2.0))
JUDGE = JudgeEvaluator(service="judge", judge=JudgeSpec(votes=2))


def sum_of(**parts: EvaluatorSpec) -> EvaluatorSpec:
    named = tuple(EvaluatorPart(name=name, evaluator=spec, weight=0.5) for name, spec in parts.items())
    return SumEvaluator(parts=named)


BOTH = sum_of(file=WROTE_42, server=HTTP, vote=JUDGE, again=WROTE_42)
FILE_AND_SERVER = sum_of(file=WROTE_42, server=HTTP)
TASKS = [
    Task(id=TaskId(f"t{number}"), family="f", instruction="write 42", evaluator=spec)
    for number, spec in enumerate((HTTP, JUDGE, BOTH, FILE_AND_SERVER))
]


def order(number: int, task: Task) -> RolloutOrder:
    return RolloutOrder(rollout_id=RolloutId(f"r{number}"), group_id=GroupId(f"g{number}"), task_id=task.id, attempt=0)


@asynccontextmanager
async def worker(
    folder: Path, services: dict[str, ServiceConfig]
) -> AsyncIterator[tuple[Callable[..., Awaitable[RolloutResult]], WorkerStations]]:
    """A function that runs a rollout whose shell agent writes 42, and the stations of its worker."""
    rigs.write_tokenizer(folder / "model")
    directory = RunDirectory(path=folder / "run")
    directory.path.mkdir()
    observing = ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=directory.path)
    engine = rigs.scripted.ScriptedEngine.of(folder / "model", rigs.STOP, lambda _: "echo 42 > answer; exit")
    directory.train_tasks.parent.mkdir(parents=True, exist_ok=True)
    idle = Task(id=TaskId("t"), family="f", instruction="i", evaluator=NoEvaluator())
    write_tasks(directory.train_tasks, [idle])
    directory.identity.write_text("services")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(rigs.scripted.serving(engine))
        pool = await enter(SandboxPool(SandboxSection(), directory=directory))
        config = GatewayConfig(tokenizer_dir=folder / "model")
        gateway = await enter(GatewayActor(config, address_file=directory.path / "gateway.json", observing=observing))
        assert await gateway.set_engines(
            RoutingTable(version=1, engines=(EngineRoute(engine_id=EngineId("e"), url=engine.url),))
        )
        parts = WorkerParts(
            pool=pool,
            evaluator=await enter(Evaluator(pool, observing, TaskCatalog(train=TASKS))),
            replay=await enter(Replay(BufferConfig(batch_size=2, group_size=2), directory=directory, seed=0)),
            sources={
                "": SourceParts(
                    agent=shell_agent(ShellAgentConfig(max_turns=2)),
                    sampling=Sampling(),
                    train_truncated=True,
                    train_cut=False,
                    train=(TrainedPart.MAIN,),
                    serve_unhonoured=True,
                    budgets=Budgets(max_context_tokens=8192),
                    rollout=RolloutConfig(),
                )
            },
            lease_s=RolloutConfig().lease_s,
            tasks=TaskCatalog(),
            gateways=(gateway,),
            observing=observing,
            services=services,
        )
        stations = await enter(WorkerStations(parts, "holder"))
        ran = 0

        async def rolled_out(evaluator: EvaluatorSpec, evaluate_s: float = 90.0) -> RolloutResult:
            nonlocal ran
            ran += 1
            [task] = [task for task in TASKS if task.evaluator == evaluator]
            own = stations.of(task.id)
            attempt = order(ran, task)
            return await RunningAttempt(attempt, task, own, RolloutConfig(evaluate_timeout_s=evaluate_s)).run()

        yield rolled_out, stations


def table(kind: ServiceKind, url: str) -> ServiceConfig:
    return ServiceConfig(kind=kind, url=url, timeout_s=1.0, retry=RetrySection(attempts=2, total_s=5.0))


async def test_rollouts_are_scored_by_a_server_and_a_judge_or_not_at_all(tmp_path: Path) -> None:
    grader = ScriptedService(answer_with({}, 502), answer_with({"reward": 0.9, "solved": True}))
    judge = ScriptedService(answer_with(completion(r"\boxed{0.5}")))
    async with grader.served() as grader_url, judge.served() as judge_url:
        services = {
            "grader": table(ServiceKind.REWARD, f"{grader_url}/score"),
            "judge": table(ServiceKind.MODEL, judge_url),
        }
        async with worker(tmp_path, services) as (rolled_out, stations):
            alone = await rolled_out(HTTP)
            assert (alone.outcome.reward, alone.outcome.solved) == (2.0, True), alone.outcome
            assert [sent["key"] for sent in grader.requests] == ["r1.0", "r1.0"]
            said = [part["text"] for part in grader.requests[-1]["episode"]["parts"] if part["source"] == "policy"]
            assert said[0] == "echo 42 > answer; exit"
            assert [name for name, _ in alone.phases_s][-2:] == ["service.grader", "evaluate"]
            assert dict(alone.phases_s)["service.grader"] > 0

            both = await rolled_out(BOTH)
            assert (both.outcome.reward, both.outcome.solved) == (0.5 * (1.0 + 2.0 + 0.5 + 1.0), True), both.outcome
            assert grader.requests[-1]["key"] == "r2.0.server"

            grader.script[:] = [answer_with({"reward": "much"})]
            nonsense = await rolled_out(FILE_AND_SERVER)
            assert (nonsense.outcome.reward, nonsense.outcome.cause) == (None, Cause.EVALUATOR)
            assert "server: service grader: evaluator error: the reward is not a number" in nonsense.outcome.detail

            grader.script[:] = [silent]
            late = await rolled_out(HTTP, 0.3)
            assert (late.outcome.reward, late.outcome.cause) == (None, Cause.INFRA)
            assert late.outcome.detail == "evaluate: no result within 0.3 s while it waited for service grader"

            judge.script[:] = [answer_with({}, 502)]
            down = await rolled_out(JUDGE)
            assert (down.outcome.reward, down.outcome.cause) == (None, Cause.INFRA)
            assert "evaluate: ServiceDown: service judge: " in down.outcome.detail
            figures: dict[str, Any] = stations.service_figures
    assert (figures["grader"].totals.calls, figures["grader"].totals.retries) == (3, 1)
    assert (figures["judge"].totals.calls, figures["judge"].totals.failures) == (4, 2)
