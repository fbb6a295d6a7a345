"""An agent, an evaluator and a converter of a package outside of headrace, as recipes, tasks and commands name them."""

from __future__ import annotations

import asyncio
import json
import pickle
import runpy
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.actors.agents.registry.config import AgentSection
from headrace.actors.agents.registry.registry import make_agent
from headrace.actors.cli.app import app
from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, evaluate
from headrace.actors.evaluation.graders.plugins import refuse_absent_evaluators
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.services.chat import ChatMessage, ChatReply
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.datasets.converters import convert
from headrace.buffer.tasks.evaluators import PluginEvaluator
from headrace.buffer.tasks.task import Task, TaskId, load_tasks, task_digest, write_tasks
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider
from support import run_rig as rig
from support.clean_sandboxes import CleanSandboxes

pytestmark = pytest.mark.namespaces
ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "scripts" / "recipes" / "quickstart.toml"
GUESSING = (
    "training.steps=2",
    "buffer.batch_size=8",
    "buffer.group_size=4",
    "dispatcher.slots_per_worker=12",
    "dispatcher.evaluation_slots=2",
    "sandbox.pool.max_live=24",
    "sampling.max_tokens_per_turn=12",
    "evaluation.tasks=2",
    "evaluation.samples=1",
    "evaluation.every_steps=0",
    "engines.count=1",
)
MODULE = '''
import asyncio
import json

from headrace.actors.agents.programs.agent import AgentReport, StopReason
from headrace.actors.evaluation.graders.verdict import rewarded
from headrace.buffer.tasks.evaluators import StateEvaluator
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import FrozenMount, SandboxSpec


class Greeter:
    """An agent that asks nobody."""

    folders = ()

    def __init__(self, name="world"):
        self.name = name

    async def run(self, *, session, sandbox, task):
        await sandbox.exec(f"echo hello {self.name} > /workspace/greeting", timeout_s=20)
        return AgentReport(stop=StopReason.FINISHED, turns=0)


async def by_length(task, request, sandboxes):
    """The longer the greeting, the better."""
    mount = FrozenMount(source=request.sandbox.id, path="/workspace", target="/workspace")
    async with sandboxes.clean(SandboxSpec(image=task.image, mounts=(mount,))) as sandbox:
        greeting = await sandbox.read("/workspace/greeting", max_bytes=1000)
    return rewarded(len(greeting) / 10, solved=None)


async def raises(task, request, sandboxes):
    raise KeyError("reward")


async def never(task, request, sandboxes):
    await asyncio.Event().wait()


async def expects_a_file(task, request, sandboxes):
    async with sandboxes.clean(SandboxSpec(image=task.image)) as sandbox:
        await sandbox.read("/workspace/absent", max_bytes=10)


async def number(task, request, sandboxes):
    return 1.0


async def infinite(task, request, sandboxes):
    from headrace.actors.evaluation.graders.verdict import Verdict
    from headrace.buffer.trajectories.types import Cause
    return Verdict(reward=float("inf"), cause=Cause.SOLVED, solved=True)


def rows(source, settings):
    check = StateEvaluator(check="pass")
    lines = source.read_text().splitlines()
    return tuple(Task(id=line, family=settings["family"], instruction=line, evaluator=check) for line in lines), ()
'''


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_things.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_things", raising=False)


def examples() -> dict[str, str]:
    """The Python blocks of docs/extending.md by the name in their first line."""
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    return {block.split("\n")[0].removeprefix("# "): block for block in blocks}


class Says:
    """A policy that always gives the same answer."""

    def __init__(self, text: str) -> None:
        self.chat = self
        self._text = text

    async def __call__(self, messages: Sequence[ChatMessage]) -> ChatReply:
        return ChatReply(text=self._text, finish_reason="stop")


async def test_the_examples_in_the_docs_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in examples().items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    page = (ROOT / "docs" / "extending.md").read_text()
    (tmp_path / "task.jsonl").write_text(page.split("```json\n")[1].split("```")[0])
    [long] = load_tasks(tmp_path / "task.jsonl")
    recipe = tomllib.loads(page.split("```toml\n")[1].split("```")[0])
    agent = make_agent(AgentSection.model_validate(recipe["agent"]))
    async with LocalProvider() as provider:
        ref = await provider.create(SandboxSpec())
        sandbox = await provider.attach(ref)
        session = Says("printf '%0120d' 0 > text")
        report = await agent.run(session=session, sandbox=sandbox, task=long)  # type: ignore[arg-type]
        sandboxes = CleanSandboxes(provider, sandbox)
        request = EvaluationRequest(key="1", task_id=long.id, sandbox=ref)
        found = await evaluate(long, request, sandboxes)
    assert (report.turns, found.reward, found.solved) == (1, pytest.approx(1.2), True)
    (tmp_path / "rows").write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "why?"}\n')
    done = convert(tmp_path / "rows", tmp_path / "out", form="forms:questions", settings={"family": "sums"})
    [sums] = load_tasks(done.tasks)
    assert (sums.id, len(done.refusals)) == ("sums-1", 1)
    with pytest.raises(SystemExit, match="True"):  # no answer is reward 0, not a broken check
        exec(sums.evaluator.check, {})
    runpy.run_path(str(tmp_path / "gauges.py"))["record_disk"](tmp_path, 7)
    [metric] = read_metrics(tmp_path / "metrics.jsonl", ("disk",))
    assert metric["free_bytes"] == 7


def task(plugin: str, **evaluator: Any) -> Task:
    spec = PluginEvaluator(plugin=plugin, **evaluator)
    return Task(id=TaskId("greet"), family="greet", instruction="greet somebody", evaluator=spec)


async def verdict(plugin: str, **evaluator: Any) -> Any:
    agent = make_agent(AgentSection(kind="their_things:Greeter", settings={"name": "you"}))
    async with LocalProvider() as provider:
        ref = await provider.create(SandboxSpec())
        sandbox = await provider.attach(ref)
        greet = task(plugin, **evaluator)
        await agent.run(session=None, sandbox=sandbox, task=greet)  # type: ignore[arg-type]
        return await evaluate(
            greet, EvaluationRequest(key="1", task_id=greet.id, sandbox=ref), CleanSandboxes(provider, sandbox)
        )


async def test_an_agent_and_an_evaluator_can_come_from_another_package() -> None:
    found = await verdict("their_things:by_length")
    assert (found.reward, found.cause) == (pytest.approx(1.0), Cause.SOLVED)


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("raises", "their_things:raises raised KeyError: 'reward'"),
        ("never", "their_things:never exceeded timeout_s=0.2"),
        ("expects_a_file", "their_things:expects_a_file did not handle a file error: /workspace/absent: No such file"),
        ("number", "their_things:number: returned float instead of a Verdict"),
        ("infinite", "their_things:infinite: "),
        ("absent", "has no attribute 'absent'"),
    ],
)
async def test_errors_in_an_evaluator_plugin_are_evaluator_errors(plugin: str, said: str) -> None:
    """F12."""
    timeout = {"timeout_s": 0.2} if plugin == "never" else {}
    found = await verdict(f"their_things:{plugin}", **timeout)
    assert (found.reward, found.cause) == (None, Cause.EVALUATOR)
    assert said in found.detail


def test_agents_can_be_pickled_for_workers() -> None:
    agent = make_agent(AgentSection(kind="their_things:Greeter", settings={"name": "you"}))
    assert pickle.loads(pickle.dumps(agent)).name == "you"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"kind": "claud-code"},
            "there is no agent 'claud-code'; available: loop, shell, immediate, simulated, claude-code",
        ),
        ({"kind": "their_things:Absent"}, "has no attribute 'Absent'"),
        (
            {"kind": "their_things:Greeter", "settings": {"nam": 1}},
            "agent.settings: their_things:Greeter does not",
        ),
        ({"kind": "builtins:dict"}, "'builtins:dict' did not return an agent: 'run' is missing"),
        ({"kind": "sys:path"}, "is not a valid agent: it is not callable"),
    ],
)
def test_an_invalid_agent_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_agent(AgentSection.model_validate(section))
    assert said in str(refused.value)


def test_a_run_with_a_missing_agent_fails_at_startup(tmp_path: Path) -> None:
    command = ["run", str(QUICKSTART), "--runs-dir", str(tmp_path / "runs")]
    told = CliRunner().invoke(app, [*command, "--set", "agent.kind=their_things:Absent"])
    assert isinstance(told.exception, ConfigError)
    assert "agent.kind: agent 'their_things:Absent': AttributeError" in str(told.exception)


def test_a_task_selects_its_evaluator_by_name(tmp_path: Path) -> None:
    greet = task("their_things:by_length", check="whatever it reads", expected="this too")
    write_tasks(tmp_path / "tasks.jsonl", [greet])
    [read] = load_tasks(tmp_path / "tasks.jsonl")
    assert (read, task_digest(read)) == (greet, task_digest(greet))
    refuse_absent_evaluators([read])
    with pytest.raises(
        ConfigError, match=r"task greet: evaluator\.plugin: 'their_things:rows' is not a valid evaluator"
    ):
        refuse_absent_evaluators([task("their_things:rows")])
    for evaluator in ({"kind": "plugin"}, {"kind": "state", "check": "pass", "plugin": "a:b"}):
        document = {"id": "a", "family": "a", "instruction": "a", "evaluator": evaluator}
        (tmp_path / "bad.jsonl").write_text(json.dumps(document) + "\n")
        with pytest.raises(TaskFileError, match=r"evaluator\.plugin: (is missing|unknown field of the kind state)"):
            load_tasks(tmp_path / "bad.jsonl")


def test_a_data_format_can_come_from_another_package(tmp_path: Path) -> None:
    (tmp_path / "greetings").write_text("one\ntwo\n")
    command = ["data", "convert", str(tmp_path / "greetings"), "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(app, [*command, "--form", "their_things:rows", "--set", "family=greet"])
    assert told.exit_code == 0, told.output
    assert [task.instruction for task in load_tasks(tmp_path / "out" / "tasks.jsonl")] == ["one", "two"]


SWE_ROW = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "problem_statement": "mend it",
    "image": "img:{instance_id}",
    "test_patch": "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": ["t.py::test_a"],
}


def test_swe_rows_are_converted_or_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(SWE_ROW), json.dumps({"instance_id": "x"}), "no json"]))
    command = ["data", "convert", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(app, [*command, "--set", "timeout_s=60", "--json", str(tmp_path / "told.json")])
    assert told.exit_code == 0, told.output
    [read] = load_tasks(tmp_path / "out" / "tasks.jsonl")
    assert (read.id, read.image, read.evaluator.timeout_s) == ("a__b-1", "img:a__b-1", 60.0)
    refused = [json.loads(line) for line in (tmp_path / "out" / "refused.jsonl").read_text().splitlines()]
    assert [row["line"] for row in refused] == [2, 3]
    assert json.loads((tmp_path / "told.json").read_text())["refused"] == refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--form", "swebench"], "--form swebench: there is no form of data 'swebench'; available: swe"),
        (["--set", "workdi=/x"], "--form swe: workdi: unknown setting; the settings are image, workdir"),
        (["--set", "timeout_s=soon"], "--form swe: timeout_s: Input should be a valid number"),
    ],
)
def test_invalid_conversion_input_is_refused(tmp_path: Path, given: list[str], said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(SWE_ROW))
    command = ["data", "convert", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(app, [*command, *given])
    assert isinstance(told.exception, ConfigError)
    assert said in str(told.exception)


def test_an_unreadable_data_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (
        ("absent", "No such file"),
        ("binary", "is not UTF-8 text"),
        (".", "is a folder without task folders"),
    ):
        told = CliRunner().invoke(app, ["data", "convert", str(tmp_path / name), "--out", str(tmp_path / "out")])
        assert said in str(told.exception)


def environment_section() -> tuple[str, str, dict[str, Any]]:
    """The module, the recipe and the task of the section on environments in docs/extending.md."""
    section = (ROOT / "docs" / "extending.md").read_text().split("\n## An environment\n")[1].split("\n## ")[0]
    code, recipe, row = (section.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "toml", "json"))
    return code, recipe, json.loads(row)


@pytest.mark.timeout(600)
def test_a_system_of_another_package_runs(tmp_path: Path) -> None:
    """The environment, the evaluator and the recipe of the docs, outside the repository, by the command line."""
    code, recipe, row = environment_section()
    assert len(code.splitlines()) + len(recipe.splitlines()) <= 60
    (tmp_path / "guessing.py").write_text(code)
    (tmp_path / "guessing.toml").write_text(recipe)
    (tmp_path / "model").symlink_to(ROOT / "scripts" / "models" / "tiny")
    for name, numbers in (("train", range(8)), ("heldout", range(8, 10))):
        rows = (
            row
            | {"id": f"{name}-{number}", "instruction": f"Guess the number {number + 1}."}
            | {"environment": row["environment"] | {"secret": {"number": number}}}
            for number in numbers
        )
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    outputs = ("--runs-dir", str(tmp_path), "--name", "run", "--quiet", "--json", str(tmp_path / "out.json"))
    small = [argument for setting in GUESSING for argument in ("--set", setting)]
    machine = ("--on", str(ROOT / "scripts" / "machines" / "cpu.toml"))
    driver = rig.start_driver(
        "run", str(tmp_path / "guessing.toml"), *machine, *outputs, *small, PYTHONPATH=str(tmp_path)
    )
    try:
        _, errors = driver.communicate(timeout=400)
    finally:
        driver.terminate()
    assert driver.returncode == 0, errors.decode()
    summary = json.loads((tmp_path / "out.json").read_text())
    assert (summary["steps"], summary["lost"], summary["trained_twice"], summary["problems"]) == (2, 0, 0, [])
    attempts = [attempt for attempt in read_evidence(tmp_path / "run").attempts if attempt.offered]
    failures = {attempt.detail for attempt in attempts if attempt.cause in (Cause.INFRA, Cause.EVALUATOR, Cause.POISON)}
    assert not failures
    assert sum(attempt.reward is not None for attempt in attempts) >= 16


async def test_a_cancelled_evaluation_gives_no_verdict() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await verdict("their_things:never", timeout_s=60.0)
