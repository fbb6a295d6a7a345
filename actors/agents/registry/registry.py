"""The registry of agents that recipes can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from headrace.actors.agents.loop.action_parsers import PARSERS, ParserKind
from headrace.actors.agents.loop.agent import LoopAgent
from headrace.actors.agents.loop.config import LoopConfig
from headrace.actors.agents.loop.judge import check_judge
from headrace.actors.agents.programs.agent import Agent, ImmediateAgent
from headrace.actors.agents.programs.claude_code import ClaudeCode
from headrace.actors.agents.programs.codex import Codex
from headrace.actors.agents.programs.installation import AgentMissing
from headrace.actors.agents.programs.mini_swe_agent import MiniSweAgent
from headrace.actors.agents.programs.opencode import Opencode
from headrace.actors.agents.programs.qwen_code import QwenCode
from headrace.actors.agents.programs.simulated import SimulatedAgent
from headrace.actors.agents.registry.config import AgentKind, AgentSection, ShellAgentConfig
from headrace.actors.environments.config import EnvironmentSection
from headrace.actors.environments.registry import make_environment
from headrace.actors.environments.shell import ShellConfig, ShellEnvironment
from headrace.actors.errors import ConfigError
from headrace.buffer.primitives.registry import PartRefused, Registry
from headrace.buffer.tasks.evaluators import OF_EPISODES, EnvironmentEvaluator, EvaluatorSpec
from headrace.buffer.tasks.task import Task

MakeAgent: TypeAlias = Callable[[AgentSection], Agent]


def make_agent(section: AgentSection, environment: EnvironmentSection | None = None) -> Agent:
    """Create the agent of a recipe; the loop agent acts in `environment`. Raises ConfigError for an unknown agent, a
    missing program or invalid settings."""
    if section.kind is AgentKind.LOOP:
        return _loop_agent(section, environment or EnvironmentSection())
    try:
        return AGENTS.find(section.kind)(section)
    except (AgentMissing, PartRefused) as error:
        raise ConfigError(f"agent.kind: {error}") from error


def _loop_agent(section: AgentSection, environment_section: EnvironmentSection) -> LoopAgent:
    environment = make_environment(environment_section)
    parsed, accepted = PARSERS[section.loop.parser].actions, environment.actions
    if parsed is not None and accepted is not None and not parsed & accepted:
        raise ConfigError(
            f"agent.loop.parser {section.loop.parser} produces {_listed(parsed)}, but the environment "
            f"{environment_section.kind} accepts {_listed(accepted)}; choose another parser or environment"
        )
    check_judge(section.loop.judge)
    return LoopAgent(section.loop, environment)


def refuse_unrecorded_episodes(section: AgentSection, task: Task) -> None:
    """Raise ConfigError if the task's evaluator needs the record of an episode, if the agent keeps none:
    every rollout would end as a fault of the evaluator."""
    unusable: tuple[type[EvaluatorSpec], ...] = () if section.keeps_episodes else OF_EPISODES
    if section.kind is AgentKind.SHELL:
        # Its environment returns no verdict; those of the loop agent are checked with the environment.
        unusable = (EnvironmentEvaluator,)
    for spec in task.evaluators:
        if isinstance(spec, unusable):
            raise ConfigError(
                f"task {task.id}: evaluator.kind {spec.kind} scores the record of an episode, which agent.kind "
                f"{section.kind} does not leave; set agent.kind to loop, or choose an evaluator of files "
                "(guide 'Task files')"
            )


def shell_agent(config: ShellAgentConfig) -> LoopAgent:
    """Return the shell agent: each answer is one command line, whose output is the next message. An answer of another
    form ends the rollout."""
    shell = ShellConfig(
        working_directory=config.working_directory,
        command_timeout_s=config.command_timeout_s,
        max_output_bytes=config.max_observation_bytes,
    )
    return LoopAgent(LoopConfig(parser=ParserKind.LINE, max_turns=config.max_turns), ShellEnvironment(shell))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _of_another_package(found: object) -> MakeAgent:
    """Return a factory that calls `found` with `agent.settings`, which must return an Agent."""
    if not callable(found):
        raise TypeError("it is not callable; give a function or class that takes agent.settings")
    make: Callable[..., Any] = found

    def made(section: AgentSection) -> Agent:
        try:
            agent: Agent = make(**section.settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"agent.settings: {section.kind} does not accept them: {error}") from error
        for name in ("run", "folders"):
            if not hasattr(agent, name):
                raise ConfigError(
                    f"agent.kind: {section.kind!r} did not return an agent: {name!r} is missing "
                    "(guide 'Extending headrace')"
                )
        return agent

    return made


AGENTS: Final[Registry[MakeAgent]] = Registry(
    kind="agent",
    group="headrace.agents",
    own={
        AgentKind.LOOP: lambda section: _loop_agent(section, EnvironmentSection()),
        AgentKind.SHELL: lambda section: shell_agent(section.shell),
        AgentKind.IMMEDIATE: lambda _: ImmediateAgent(),
        AgentKind.SIMULATED: lambda section: SimulatedAgent(section.simulated),
        AgentKind.CLAUDE_CODE: lambda section: ClaudeCode(section.program, section.claude_code),
        AgentKind.CODEX: lambda section: Codex(section.program, section.codex),
        AgentKind.MINI_SWE_AGENT: lambda section: MiniSweAgent(section.program, section.mini_swe_agent),
        AgentKind.QWEN_CODE: lambda section: QwenCode(section.program),
        AgentKind.OPENCODE: lambda section: Opencode(section.program),
    },
    accept=_of_another_package,
)
