"""Programs that are agents, run live: a local sandbox without network, the real gateway, a scripted engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.actors.agents.agent import AgentSession
from headrace.actors.agents.chat import ChatFailed
from headrace.actors.agents.installing import AgentMissing, installed_folder
from headrace.actors.evaluators.verdict import Verdict
from headrace.actors.rollout import RolloutConfig, run_rollout
from headrace.buffer.tasks import EvaluatorKind, EvaluatorSpec, Task, TaskId
from headrace.buffer.types import Cause, GroupId, RolloutId, RolloutOrder
from headrace.policies.engine import EngineId
from headrace.sandboxes import doctor
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import NamespacesUnavailable
from headrace.sandboxes.local.provider import LocalProvider
from headrace.sandboxes.pool.booting import Lease
from headrace.serve.client import GatewayClient
from headrace.serve.gateway import Gateway, GatewayConfig
from headrace.serve.routing import EngineRoute, RoutingTable
from headrace.serve.rows import SessionReport
from headrace.serve.session import Budgets, SessionId, SessionSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import ModuleType

    from headrace.actors.agents.agent import AgentReport
    from headrace.actors.agents.chat import ChatMessage, ChatReply
    from headrace.actors.agents.cli_agent import CliAgent
    from headrace.actors.evaluators.verdict import EvaluationRequest
    from headrace.buffer.types import RolloutResult
    from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef
    from headrace.sandboxes.pool.booting import LeaseRequest
    from headrace.serve.client import OpenedSession

ADMIN = "an admin token of enough letters"
STOP = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", STOP)
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

You may call one or more functions. Their signatures:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each call write a JSON object with name and arguments between <tool_call> and </tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BROKEN = "def add(a, b):\n    return a - b\n"
TEST = "import unittest\nfrom calc import add\n\n\nclass T(unittest.TestCase):\n    def test_add(self):\n"
FILES = {"/workspace/calc.py": BROKEN, "/workspace/test_calc.py": f"{TEST}        self.assertEqual(add(2, 3), 5)\n"}
INSTRUCTION = "MAIN-TASK: add() of calc.py is wrong, mend it"


def support(name: str) -> ModuleType:
    """Another module of this folder."""
    known = f"headrace_tests_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


scripted = support("scripted_engine")


def task(instruction: str = INSTRUCTION) -> Task:
    evaluator = EvaluatorSpec(kind=EvaluatorKind.NONE)
    return Task(id=TaskId("t"), family="f", instruction=instruction, evaluator=evaluator, files=FILES)


def call(name: str, **arguments: Any) -> str:
    """A call as models of the Qwen and Hermes families write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_tokenizer(folder: Path) -> None:
    """A model's tokenizer: a few hundred merges, so that a text has many spellings in ids, and a template with tools
    of the Qwen3 shape."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([Path(json.__file__).read_text(), Path(pytest.__file__).read_text()], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKUP])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": STOP, "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stop_id = tokenizer.token_to_id(STOP)
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": stop_id}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_id}))


def needs(agent: str) -> None:
    """Skip where the agent could not be installed."""
    try:
        doctor.require_namespaces()
        installed_folder(agent)
    except (NamespacesUnavailable, AgentMissing) as error:
        pytest.skip(str(error))


async def no_chat(_: Sequence[ChatMessage]) -> ChatReply:
    raise ChatFailed("programs do not use it")


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
        names = (await self.out("cat /proc/[0-9]*/comm")).split("\n")
        assert sorted(names) == ["cat", "headrace-launch"], names


@dataclass
class Rig:
    """A gateway before scripted engines, and sandboxes."""

    client: GatewayClient
    engines: list[Any]
    provider: LocalProvider
    runs: int = 0

    @property
    def engine(self) -> Any:
        return self.engines[0]

    async def run(self, agent: CliAgent, *, told: Task | None = None, **budgets: Any) -> Ran:
        """One run of an agent on the broken repository, session and sandbox of its own."""
        told = told or task()
        self.runs += 1
        allowed = Budgets(**({"max_turns": 100, "max_context_tokens": 200_000} | budgets))
        spec = SessionSpec(session_id=SessionId(f"run-{self.runs}"), budgets=allowed)
        [opened] = await self.client.open([spec])
        sandbox = await self.provider.attach(await self.provider.create(SandboxSpec(folders=agent.folders)))
        await sandbox.write_many({path: text.encode() for path, text in told.files.items()})
        session = AgentSession(base_url=opened.base_url, chat=no_chat, context_tokens=allowed.max_context_tokens)
        report = await agent.run(session=session, sandbox=sandbox, task=told)
        [record] = await self.client.finish([opened.session_id])
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

    async def lease(self, request: LeaseRequest) -> Lease:
        return Lease(ref=await self.rig.provider.create(request.spec))

    async def attach(self, ref: SandboxRef) -> Sandbox:
        return await self.rig.provider.attach(ref)

    async def release(self, sandbox: SandboxId) -> None:
        await self.rig.provider.destroy(sandbox)

    async def open_session(self, order: RolloutOrder, traceparent: str) -> OpenedSession:
        spec = SessionSpec(session_id=SessionId(order.rollout_id), budgets=Budgets(max_context_tokens=200_000))
        [opened] = await self.rig.client.open([spec])
        return opened

    async def run_agent(self, order: RolloutOrder, sandbox: Sandbox, session: OpenedSession) -> AgentReport:
        given = AgentSession(base_url=session.base_url, chat=no_chat, context_tokens=200_000)
        self.reports.append(await self.agent.run(session=given, sandbox=sandbox, task=order.task))
        return self.reports[-1]

    async def finish_session(self, session: OpenedSession) -> SessionReport:
        [record] = await self.rig.client.finish([session.session_id])
        assert isinstance(record, SessionReport)
        self.records.append(record)
        return record

    async def evaluate(self, request: EvaluationRequest) -> Verdict:
        return Verdict(reward=1.0, cause=Cause.SOLVED)


async def rollout(rig: Rig, agent: CliAgent, *, agent_timeout_s: float) -> tuple[RolloutResult, Stations]:
    """One rollout by the worker's own code, and what its stations saw."""
    stations = Stations(rig, agent)
    order = RolloutOrder(rollout_id=RolloutId("r"), group_id=GroupId("g"), attempt=1, task=task())
    return await run_rollout(order, stations, RolloutConfig(agent_timeout_s=agent_timeout_s)), stations


@asynccontextmanager
async def open_rig(tokenizer_dir: Path, *scripts: Any, **config: Any) -> AsyncIterator[Rig]:
    """One engine for each script."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(scripted.serving(scripted.ScriptedEngine.of(tokenizer_dir, STOP, script)))
            for script in scripts
        ]
        gateway = Gateway(GatewayConfig(tokenizer_dir=tokenizer_dir, abort_grace_s=1.0, **config), ADMIN)
        url = await gateway.start()
        stack.push_async_callback(gateway.stop)
        routes = tuple(EngineRoute(engine_id=EngineId(f"e{n}"), url=engine.url) for n, engine in enumerate(engines))
        assert await gateway.set_engines(RoutingTable(version=1, engines=routes))
        client = await stack.enter_async_context(GatewayClient(url, ADMIN))
        provider = await stack.enter_async_context(LocalProvider())
        yield Rig(client, engines, provider)
