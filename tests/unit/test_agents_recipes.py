"""Recipes that name an agent: those that come with headrace, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.actors.agents.loop.agent import LoopAgent
from headrace.actors.agents.programs.agent import ImmediateAgent
from headrace.actors.agents.programs.cli_agent import CliAgent
from headrace.actors.agents.programs.installation import PINNED
from headrace.actors.agents.registry.config import AgentKind, AgentSection
from headrace.actors.agents.registry.registry import make_agent, refuse_unrecorded_episodes
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import load_recipe
from headrace.buffer.tasks.evaluators import (
    AnswerEvaluator,
    AnswerSpec,
    EnvironmentEvaluator,
    EvaluatorPart,
    EvaluatorSpec,
    FunctionEvaluator,
    HttpEvaluator,
    JudgeEvaluator,
    StateEvaluator,
    SumEvaluator,
)
from headrace.buffer.tasks.task import Task, TaskId

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
PROGRAMS = tuple(kind for kind in AgentKind if AgentSection(kind=kind).is_program)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_recipe_of_every_agent_loads(kind: AgentKind, tmp_path: Path) -> None:
    recipe = RECIPES / f"{kind.value.replace('-', '_')}.toml"
    config = load_recipe(recipe, [f"agent.program.folder={tmp_path}"], tmp_path / "run")
    agent: CliAgent = make_agent(config.agent)  # type: ignore[assignment]
    assert (config.agent.kind, agent.name) == (kind, kind.value)
    assert agent.folders[0].source == str(tmp_path)
    assert config.agent.max_turns == config.agent.program.max_turns


def test_every_installable_agent_has_a_kind() -> None:
    assert set(PROGRAMS) == set(PINNED)


def test_builtin_agents_need_no_program() -> None:
    shell = AgentSection()
    assert isinstance(make_agent(shell), LoopAgent)
    assert (shell.max_turns, make_agent(shell).folders) == (shell.shell.max_turns, ())
    assert isinstance(make_agent(AgentSection(kind=AgentKind.IMMEDIATE)), ImmediateAgent)


EPISODES = (
    AnswerEvaluator(answer=AnswerSpec(targets=("x",))),
    EnvironmentEvaluator(),
    FunctionEvaluator(function="module:function"),
    HttpEvaluator(service="it"),
    JudgeEvaluator(service="it"),
)


@pytest.mark.parametrize("spec", EPISODES, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("kind", [*PROGRAMS, AgentKind.IMMEDIATE, AgentKind.SIMULATED])
def test_an_agent_without_a_record_is_refused_for_evaluators_that_need_it(kind: AgentKind, spec: EvaluatorSpec) -> None:
    files = EvaluatorPart(name="files", evaluator=StateEvaluator(check="pass"))
    both = SumEvaluator(parts=(files, EvaluatorPart(name="said", evaluator=spec)))
    for one in (spec, both):
        task = Task(id=TaskId("t"), family="f", instruction="i", evaluator=one)
        with pytest.raises(ConfigError, match=rf"task t: evaluator\.kind {spec.kind} .*agent\.kind {kind} does not"):
            refuse_unrecorded_episodes(AgentSection(kind=kind), task)
        refuse_unrecorded_episodes(AgentSection(kind=AgentKind.LOOP), task)
        refuse_unrecorded_episodes(AgentSection(kind="package.module:Agent"), task)
    alone = Task(id=TaskId("t"), family="f", instruction="i", evaluator=files.evaluator)
    refuse_unrecorded_episodes(AgentSection(kind=kind), alone)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_missing_agent_is_refused_at_startup(
    kind: AgentKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"agent.kind: .*python -m .*installation {kind.value}"):
        make_agent(AgentSection(kind=kind))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("agent.max_turns=3", "unknown key agent.max_turns"),
        ("agent.program.prompt=do it", "instruction"),
        ("agent.mini_swe_agent.mode=both", "agent.mini_swe_agent.mode"),
        ("agent.program.port=0", "agent.program.port"),
        ('agent.program.environment={"A=B" = "c"}', "contain '='"),
        ('agent.program.environment={A = "\\u0000"}', "NUL"),
        ('agent.program.arguments=["a\\u0000b"]', "NUL"),
        ("sandbox.provider=simulated", "set sandbox.provider to local or remote"),
        ("sandbox.provider=e2b", "set sandbox.provider to local or remote"),
    ],
)
def test_invalid_agent_settings_are_refused(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe(RECIPES / "codex.toml", [override], tmp_path)


def test_remote_sandboxes_need_the_program_in_the_image(tmp_path: Path) -> None:
    remote = ["sandbox.provider=remote", 'sandbox.remote.urls=["http://10.0.0.1:8800"]']
    with pytest.raises(ConfigError, match=r"agent\.program\.in_image is empty"):
        load_recipe(RECIPES / "codex.toml", remote, tmp_path)
    named = load_recipe(RECIPES / "codex.toml", [*remote, "agent.program.in_image=codex"], tmp_path)
    assert make_agent(named.agent).folders == ()
