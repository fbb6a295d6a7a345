"""Whole rollouts of live agents, from the dispatcher to the buffer: boot, agent, diff, clean sandbox, batch."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from headrace.actors.agents.programs.agent import Agent
from headrace.actors.agents.programs.claude_code import ClaudeCode, ClaudeCodeConfig
from headrace.actors.agents.programs.cli_agent import ProgramConfig
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.rollouts import rollout, worker
from headrace.actors.rollouts.dispatcher import Dispatcher, DispatcherConfig
from headrace.actors.rollouts.rollout import RolloutConfig
from headrace.actors.rollouts.stations import SourceParts, WorkerParts
from headrace.actors.rollouts.worker import RolloutWorker
from headrace.actors.runtime.pools.config import SandboxSection
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.actors.runtime.pools.leases import SandboxConnections
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.tasks.task import write_tasks
from headrace.buffer.trajectories.breakdown import OTHER, TOOL, Breakdown
from headrace.policies.engine import EngineId
from headrace.sandboxes.base import ImageRef, SandboxSpec
from headrace.sandboxes.pool.pool import PoolConfig
from headrace.serve.gateway.capture.session import Budgets, Sampling, TrainedPart
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import agent_rig as rigs
from support import repositories
from support import run_rig as runs
from support.recorded_spans import attributes_of, recorded_spans

pytestmark = [pytest.mark.agents, pytest.mark.namespaces]
MAX_OTHER = 0.02
"""Largest share of an attempt's time that may be in no named part."""
SUBMITS = rigs.ending_of("mini-swe-agent")


async def image_with_pytest(pool: SandboxPool) -> ImageRef:
    """The task's image, prepared once in a sandbox."""
    [ref] = await pool.lease([SandboxSpec()])
    async with SandboxConnections() as attachments:
        sandbox = await attachments.attach(ref)
        await repositories.install_pytest(sandbox)
        return await sandbox.snapshot()


@asynccontextmanager
async def running(
    directory: RunDirectory, engine: Any, tokenizer_dir: Path, agent: Agent, *, tracing: bool = False
) -> AsyncIterator[Replay]:
    """Every actor of a run but engines and learner, in this process, at work."""
    observing = ActorTelemetry(config=TelemetryConfig(enabled=tracing), run_dir=directory.path)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        section = SandboxSection(pool=PoolConfig(max_live=8, evaluation_reserve=2))
        pool = await enter(SandboxPool(section, directory=directory))
        task = replace(repositories.repository_task(), image=await image_with_pytest(pool))
        directory.train_tasks.parent.mkdir(parents=True, exist_ok=True)
        write_tasks(directory.train_tasks, [task])
        directory.identity.write_text("agents")
        replay = await enter(Replay(BufferConfig(batch_size=2, group_size=2), directory=directory, seed=0))
        await replay.open_epoch(None)
        config = GatewayConfig(tokenizer_dir=tokenizer_dir)
        gateway = await enter(GatewayActor(config, address_file=directory.path / "gateway.json", observing=observing))
        assert await gateway.set_engines(
            RoutingTable(version=1, engines=(EngineRoute(engine_id=EngineId("e"), url=engine.url),))
        )
        parts = WorkerParts(
            pool=pool,
            evaluator=await enter(Evaluator(pool, observing, TaskCatalog(train=[task]))),
            replay=replay,
            sources={
                "": SourceParts(
                    agent=agent,
                    sampling=Sampling(),
                    train_truncated=True,
                    train_cut=False,
                    train=(TrainedPart.MAIN,),
                    serve_unhonoured=True,
                    budgets=Budgets(max_context_tokens=200_000),
                    rollout=RolloutConfig(),
                )
            },
            lease_s=RolloutConfig().lease_s,
            tasks=TaskCatalog(train=[task]),
            gateways=(gateway,),
            observing=observing,
        )
        worker = await enter(RolloutWorker(parts))
        dispatching = DispatcherConfig(slots_per_worker=2)
        dispatcher = await enter(Dispatcher(dispatching, replay=replay, pool=pool, workers=[worker]))
        tasks = await enter(asyncio.TaskGroup())
        stack.callback(tasks.create_task(dispatcher.run()).cancel)
        yield replay


class OneOfTwo:
    """The first rollout says `mends` turn by turn, every other one gives up at once."""

    def __init__(self, mends: Sequence[str], gives_up: str = "I cannot.") -> None:
        self.mends, self._gives_up = mends, gives_up
        self._begun = 0

    def __call__(self, ask: Any) -> str:
        turn = ask.prompt.count("<tool_response>")
        if turn == 0:
            self._begun += 1
            return self.mends[0] if self._begun == 1 else self._gives_up
        return self.mends[turn]


def mends_of_claude_code(look: str) -> list[str]:
    """What a policy says that mends the repository, and looks at it with a command."""
    path = f"{repositories.REPO}/calc.py"
    wrong, right = "    return sum(numbers) /", "    if not numbers:\n        return 0.0\n    return sum(numbers) /"
    return [
        rigs.call("Read", file_path=path),
        rigs.call("Edit", file_path=path, old_string=wrong, new_string=right),
        rigs.call("Bash", command=look, description="look"),
        "It is mended.",
    ]


async def test_claude_code_fixes_a_repository_and_is_trained_on_it(tmp_path: Path) -> None:
    rigs.needs("claude-code")
    rigs.write_tokenizer(tmp_path / "model")
    script = OneOfTwo(mends_of_claude_code("git diff --stat; git status --short"))
    agent = ClaudeCode(ProgramConfig(prompt="In this repository: {instruction}"), ClaudeCodeConfig(bare=True))
    directory = RunDirectory(path=tmp_path / "run")
    directory.path.mkdir()
    engine = rigs.scripted.ScriptedEngine.of(tmp_path / "model", rigs.STOP, script)
    async with (
        rigs.scripted.serving(engine),
        running(directory, engine, tmp_path / "model", agent) as replay,
    ):
        version = (await replay.status()).head
        assert version is not None
        batch = await replay.take(version, timeout_s=100)
    assert batch is not None, [answer.text for answer in engine.sampled]
    assert sorted(item.reward for item in batch.items) == [0.0, 1.0]
    [mended] = [item for item in batch.items if item.reward == 1.0]
    [row] = mended.trajectory.rows
    assert len(rigs.scripted.segments(row.loss_mask_T)) == 4
    said = engine.tokenizer.decode(row.tokens_T[row.loss_mask_T].tolist(), skip_special_tokens=False)
    assert said == "".join(f"{text}{rigs.STOP}" for text in script.mends)
    assert mended.advantage > 0
    assert "In this repository: mean([]) raises" in engine.sampled[0].prompt


async def test_the_spans_of_claude_code_are_part_of_the_rollouts_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own telemetry, whose beta has spans of requests and tools."""
    rigs.needs("claude-code")
    rigs.write_tokenizer(tmp_path / "model")
    script = OneOfTwo(mends_of_claude_code("git diff --stat; git status --short"))
    settings = ClaudeCodeConfig(bare=True, traces=True)
    agent = ClaudeCode(ProgramConfig(prompt="In this repository: {instruction}"), settings)
    directory = RunDirectory(path=tmp_path / "run")
    directory.path.mkdir()
    engine = rigs.scripted.ScriptedEngine.of(tmp_path / "model", rigs.STOP, script)
    # A process has one global provider, and this one has other tests.
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)
    with recorded_spans(monkeypatch, worker, rollout) as recorded:
        async with (
            rigs.scripted.serving(engine),
            running(directory, engine, tmp_path / "model", agent, tracing=True) as replay,
        ):
            version = (await replay.status()).head
            assert version is not None
            batch = await replay.take(version, timeout_s=100)
        assert batch is not None, [answer.text for answer in engine.sampled]
    # The end of the test cancels further rollouts.
    ended = [span for span in recorded.named(names.AGENT) if names.AGENT_STOP in attributes_of(span)]
    agents = {f"{span.context.span_id:016x}": span for span in ended if span.context}
    spans = list(SpanFolder.of_run(directory.path).spans())
    # A rollout that was cancelled may have sent spans of which the parents had not ended.
    traces = {f"{span.context.trace_id:032x}" for span in ended if span.context}
    spans = [span for span in spans if span["trace_id"] in traces]
    sent = [span for span in spans if span["attributes"].get(names.SENDER) == "agent" and span["parent_id"]]
    assert {"claude_code.interaction", "claude_code.llm_request", "claude_code.tool"} <= {s["name"] for s in sent}
    assert {span["resource"]["service.name"] for span in sent} == {"claude-code"}
    roots = [span for span in sent if span["parent_id"] in agents]
    assert {span["parent_id"] for span in roots} == set(agents), "each rollout has its own"
    known = {span["span_id"] for span in sent}
    assert all(span["parent_id"] in known or span["parent_id"] in agents for span in sent), "one tree"
    by_trace = {f"{span.context.trace_id:032x}": span for span in ended if span.context}
    for span in sent:
        of = by_trace[span["trace_id"]]
        assert of.start_time <= span["start_ns"] <= span["end_ns"] <= of.end_time


RUN_TESTS = f"PYTHONPATH={repositories.PYTEST}:. python3 -m pytest -q -p no:cacheprovider tests"
MEND = "sed -i 's/^    return sum.*/    return sum(numbers) \\/ len(numbers) if numbers else 0.0/' calc.py"


def breakdowns(run_dir: Path, *, at_least: float = 0.0) -> list[Breakdown]:
    """The breakdowns of the ledger's attempts with such a reward, printed, each of which adds up."""
    scored = [each for each in read_evidence(run_dir).attempts if each.reward is not None and each.reward >= at_least]
    found = [each.breakdown for each in scored if each.breakdown is not None]
    for breakdown in found:
        print(f"{breakdown.wall_s:.2f} s", {part: round(seconds, 3) for part, seconds in breakdown.parts_s.items()})
        assert sum(breakdown.parts_s.values()) == pytest.approx(breakdown.wall_s, abs=0.01)
    return found


def share_of_other(breakdowns: Sequence[Breakdown]) -> float:
    """The share of the time that nobody measured."""
    return sum(each.parts_s.get(OTHER, 0.0) for each in breakdowns) / sum(each.wall_s for each in breakdowns)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("agent", "mends", "tools"),
    [
        ("claude-code", mends_of_claude_code(RUN_TESTS), ("Bash", "Edit", "Read")),
        (
            "mini-swe-agent",
            [*(rigs.call("bash", command=command) for command in ("cat calc.py", MEND, RUN_TESTS)), SUBMITS],
            ("bash",),
        ),
    ],
)
async def test_the_parts_of_a_session_add_up_and_name_its_tools(
    agent: str, mends: list[str], tools: tuple[str, ...], tmp_path: Path
) -> None:
    """At most 2 % of the time of a whole rollout is in no named part."""
    rigs.needs(agent)
    rigs.write_tokenizer(tmp_path / "model")
    directory = RunDirectory(path=tmp_path / "run")
    directory.path.mkdir()
    script = OneOfTwo(mends, rigs.ending_of(agent))
    engine = rigs.scripted.ScriptedEngine.of(tmp_path / "model", rigs.STOP, script)
    program = rigs.AGENTS[agent](ProgramConfig(prompt="In this repository: {instruction}"))
    async with (
        rigs.scripted.serving(engine),
        running(directory, engine, tmp_path / "model", program) as replay,
    ):
        version = (await replay.status()).head
        assert version is not None
        batch = await replay.take(version, timeout_s=200)
    assert batch is not None, [answer.text for answer in engine.sampled]
    assert sorted(item.reward for item in batch.items) == [0.0, 1.0]
    [mended] = breakdowns(directory.path, at_least=1.0)
    assert sorted(mended.labels["tools"]) == sorted(tools)
    assert mended.labels["turns"] == len(mends)
    named = {part.removeprefix(TOOL) for part in mended.parts_s if part.startswith(TOOL)}
    assert named == set(tools)
    assert all(mended.parts_s[f"{TOOL}{name}"] > 0 for name in tools)
    assert share_of_other([mended]) <= MAX_OTHER


ONE_STEP = (
    "training.steps=1",
    "buffer.batch_size=4",
    "buffer.group_size=2",
    "dispatcher.slots_per_worker=2",
    "dispatcher.evaluation_slots=2",
    "evaluation.tasks=1",
    "evaluation.samples=1",
    "evaluation.every_steps=0",
    "sampling.max_tokens_per_turn=24",
    "agent.program.max_turns=3",
    "engines.count=1",
    "sandbox.pool.max_live=8",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent", ["claude-code", "mini-swe-agent"])
def test_a_recipe_selects_its_agent_by_name(agent: str, tmp_path: Path) -> None:
    """`headrace run` with the recipe that comes with headrace, a policy that is far too small, and one step."""
    rigs.needs(agent)
    recipe = runs.RECIPE.with_name(f"{agent.replace('-', '_')}.toml")
    options = [part for override in ONE_STEP for part in ("--set", override)]
    outputs = ("--runs-dir", str(tmp_path), "--name", "run", "--json", str(tmp_path / "out.json"), "--quiet")
    with runs.start_driver("run", str(recipe), *outputs, *options) as driver:
        said = driver.communicate()[1].decode()
    assert driver.returncode == 0, said
    out = json.loads((tmp_path / "out.json").read_text())
    assert (out["steps"], out["problems"], out["evaluation_infra"], out["sandboxes_leaked"]) == (1, [], 0, 0)
    spans = SpanFolder.of_run(tmp_path / "run").spans()
    ended = [span["attributes"] for span in spans if span["name"].startswith("invoke_agent ")]
    codes = [attributes.get("headrace.agent.exit_code") for attributes in ended]
    assert codes.count(0) >= 4, ended
    found = breakdowns(tmp_path / "run")
    assert len(found) >= 4
    assert share_of_other(found) <= MAX_OTHER


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_codex_rollout_completes_on_the_embedded_engine(tmp_path: Path) -> None:
    """Its first prompt has some 37,000 tokens of the tiny tokenizer."""
    rigs.needs("codex")
    model = tmp_path / "model"
    shutil.copytree(runs.RECIPE.parents[1] / "models" / "tiny", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    options = ("engines.count=1", "engines.max_running=2", "sampling.max_tokens_per_turn=24", f"model.path={model}")
    settings = [part for override in options for part in ("--set", override)]
    outputs = ("--out", str(tmp_path / "out"), "--json", str(tmp_path / "out.json"), "--quiet")
    counts = ("--limit", "1", "--samples", "1")
    with runs.start_driver("eval", str(runs.RECIPE.with_name("codex.toml")), *outputs, *counts, *settings) as driver:
        said = driver.communicate()[1].decode()
    assert driver.returncode == 0, said
    out = json.loads((tmp_path / "out.json").read_text())
    assert (out["n"], out["n_infra"], list(out["versions"])) == (1, 0, ["1.0"]), out
    [conversation] = (tmp_path / "out").rglob("conversation.jsonl")
    assert len(conversation.read_bytes()) > 30_000
