"""Programs that are agents, run live: a local sandbox without network, the real gateway, a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.agents.programs.agent import AgentReport, AgentSession
from headrace.actors.agents.programs.claude_code import ClaudeCode, ClaudeCodeConfig
from headrace.actors.agents.programs.cli_agent import CliAgent, ProgramConfig
from headrace.actors.agents.programs.codex import Codex, CodexConfig
from headrace.actors.agents.programs.installation import AgentMissing, installed_folder
from headrace.actors.agents.programs.mini_swe_agent import MiniSweAgent, MiniSweAgentConfig
from headrace.actors.agents.programs.opencode import Opencode
from headrace.actors.agents.programs.qwen_code import QwenCode
from headrace.actors.evaluation.graders.verdict import EvaluationRequest, Verdict
from headrace.actors.rollouts.rollout import RolloutConfig, RunningAttempt
from headrace.actors.services.chat import NoChat
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import Cause, GroupId, RolloutId, RolloutOrder, RolloutResult
from headrace.policies.engine import EngineId
from headrace.sandboxes import doctor
from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import NamespacesUnavailable
from headrace.sandboxes.local.provider import LocalProvider
from headrace.sandboxes.pool.boot import Lease, LeaseRequest
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets, SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient, OpenedSession
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from support import chat_templates
from support import scripted_engine as scripted

ADMIN = "an admin token of enough letters"
STOP = "<|im_end|>"
BROKEN = "def add(a, b):\n    return a - b\n"
TEST = "import unittest\nfrom calc import add\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n"
FILES = {"/workspace/calc.py": BROKEN, "/workspace/test_calc.py": f"{TEST}        self.assertEqual(add(2, 3), 5)\n"}
INSTRUCTION = "MAIN-TASK: add() of calc.py is wrong, mend it"


def task(instruction: str = INSTRUCTION) -> Task:
    evaluator = NoEvaluator()
    return Task(id=TaskId("t"), family="f", instruction=instruction, evaluator=evaluator, files=FILES)


def call(name: str, **arguments: Any) -> str:
    """A call as models of the Qwen and Hermes families write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


AGENTS: dict[str, Callable[[ProgramConfig], CliAgent]] = {
    "claude-code": lambda program: ClaudeCode(program, ClaudeCodeConfig(bare=True)),
    "codex": lambda program: Codex(program, CodexConfig()),
    "mini-swe-agent": lambda program: MiniSweAgent(program, MiniSweAgentConfig()),
    "qwen-code": QwenCode,
    "opencode": Opencode,
}
"""Each in its plainest form."""


def command_of(agent: str, command: str) -> str:
    """The call with which a policy has that agent run a command."""
    return {
        "claude-code": call("Bash", command=command, description="do it"),
        "codex": call("exec_command", cmd=command),
        "mini-swe-agent": call("bash", command=command),
        "qwen-code": call("run_shell_command", command=command, is_background=False),
        "opencode": call("bash", command=command, description="do it"),
    }[agent]


def ending_of(agent: str) -> str:
    """What a policy says at the end."""
    submits = command_of("mini-swe-agent", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    return submits if agent == "mini-swe-agent" else "It is done."


def write_tokenizer(folder: Path, family: str = "QWEN3") -> Path:
    """A model's tokenizer and chat template, of the Qwen3 shape or another of `chat_templates` with its end token."""
    written: Path = getattr(chat_templates, family).write(folder)
    return written


def needs(agent: str) -> None:
    """Skip where the agent could not be installed."""
    try:
        doctor.require_namespaces()
        installed_folder(agent)
    except (NamespacesUnavailable, AgentMissing) as error:
        pytest.skip(str(error))


@dataclass
class Ran:
    """A run, and what it left."""

    agent: AgentReport
    session: SessionReport
    sandbox: Sandbox

    async def out(self, command: str) -> str:
        result = await self.sandbox.exec(command, timeout_s=60)
        return (result.stdout + result.stderr).decode().strip()

    async def check_fixed(self) -> None:
        said = await self.out("python3 -B -m unittest -q test_calc 2>&1 | tail -1; cat calc.py")
        assert said.startswith("OK"), f"{said}\n{self.agent.log_tail[-3000:]}"

    async def check_quiet(self) -> None:
        """Nothing of the agent runs on: the sandbox has its first process and the question."""
        async with asyncio.timeout(30):
            # What was killed may be listed a moment longer.
            while sorted((await self.out("cat /proc/[0-9]*/comm")).split("\n")) != ["cat", "headrace-launch"]:
                pass


@dataclass
class Rig:
    """A gateway before scripted engines, and sandboxes."""

    client: GatewayClient
    engines: list[Any]
    provider: LocalProvider
    runs: int = 0
    attached: list[Sandbox] = field(default_factory=list)

    @property
    def engine(self) -> Any:
        return self.engines[0]

    async def run(self, agent: CliAgent, *, told: Task | None = None, **budgets: Any) -> Ran:
        """One run of an agent on the broken repository, session and sandbox of its own."""
        told = told or task()
        self.runs += 1
        allowed = Budgets(**({"max_turns": 100, "max_context_tokens": 200_000} | budgets))
        spec = SessionSpec(session_id=SessionId(f"run-{self.runs}"), budgets=allowed)
        opened = await self.client.open(spec)
        sandbox = await self.provider.attach(await self.provider.create(SandboxSpec(folders=agent.folders)))
        await sandbox.write_many({path: text.encode() for path, text in told.files.items()})
        session = AgentSession(base_url=opened.base_url, chat=NoChat(), context_tokens=allowed.max_context_tokens)
        report = await agent.run(session=session, sandbox=sandbox, task=told)
        record = await self.client.finish(opened.session_id)
        assert isinstance(record, SessionReport)
        return Ran(report, record, sandbox)


@dataclass
class Stations:
    """The stations of a rollout over a rig; every verdict is `solved`."""

    rig: Rig
    agent: CliAgent
    reports: list[AgentReport] = field(default_factory=list)
    records: list[SessionReport] = field(default_factory=list)

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return self.agent.folders

    agent_name = "shell"

    @property
    def needs_sandbox(self) -> bool:
        return True

    @property
    def keeps_time(self) -> bool:
        return False

    async def lease(self, request: LeaseRequest) -> Lease:
        return Lease(ref=await self.rig.provider.create(request.spec))

    async def attach(self, ref: SandboxRef) -> Sandbox:
        sandbox = await self.rig.provider.attach(ref)
        self.rig.attached.append(sandbox)
        return sandbox

    async def release(self, sandbox: SandboxId) -> None:
        await self.rig.provider.destroy(sandbox)

    async def open_session(self, order: RolloutOrder, task: Task, traceparent: str) -> OpenedSession:
        spec = SessionSpec(session_id=SessionId(order.rollout_id), budgets=Budgets(max_context_tokens=200_000))
        return await self.rig.client.open(spec)

    async def run_agent(
        self, order: RolloutOrder, task: Task, sandbox: Sandbox | None, session: OpenedSession, agent_s: float
    ) -> AgentReport:
        assert sandbox is not None
        given = AgentSession(base_url=session.base_url, chat=NoChat(), context_tokens=200_000)
        self.reports.append(await self.agent.run(session=given, sandbox=sandbox, task=task))
        return self.reports[-1]

    async def finish_session(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        record = await self.rig.client.finish(session.session_id, conversation=conversation)
        assert isinstance(record, SessionReport)
        self.records.append(record)
        return record

    async def evaluate(self, task: Task, request: EvaluationRequest) -> Verdict:
        return Verdict(reward=1.0, solved=True, cause=Cause.SOLVED)


async def rollout(rig: Rig, agent: CliAgent, *, agent_timeout_s: float) -> tuple[RolloutResult, Stations]:
    """One rollout by the worker's own code, and what its stations saw."""
    stations = Stations(rig, agent)
    order = RolloutOrder(rollout_id=RolloutId("r"), group_id=GroupId("g"), attempt=1, task_id=TaskId("t"))
    return await RunningAttempt(order, task(), stations, RolloutConfig(agent_timeout_s=agent_timeout_s)).run(), stations


@asynccontextmanager
async def open_rig(tokenizer_dir: Path, *scripts: Any, **config: Any) -> AsyncIterator[Rig]:
    """One engine for each script."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(scripted.serving(scripted.ScriptedEngine.of(tokenizer_dir, STOP, script)))
            for script in scripts
        ]
        gateway = Gateway(GatewayConfig(tokenizer_dir=tokenizer_dir, abort_grace_s=10.0, **config), ADMIN)
        url = await gateway.start()
        stack.push_async_callback(gateway.stop)
        routes = tuple(EngineRoute(engine_id=EngineId(f"e{n}"), url=engine.url) for n, engine in enumerate(engines))
        assert await gateway.set_engines(RoutingTable(version=1, engines=routes))
        client = await stack.enter_async_context(GatewayClient(url, ADMIN))
        provider = await stack.enter_async_context(LocalProvider())
        yield Rig(client, engines, provider)
