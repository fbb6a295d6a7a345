"""The registry of agents that recipes can name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headrace.actors.agents.claude_code import ClaudeCode
from headrace.actors.agents.codex import Codex
from headrace.actors.agents.config import AgentKind, AgentSection
from headrace.actors.agents.immediate import ImmediateAgent
from headrace.actors.agents.installation import AgentMissing
from headrace.actors.agents.mini_swe_agent import MiniSweAgent
from headrace.actors.agents.opencode import Opencode
from headrace.actors.agents.qwen_code import QwenCode
from headrace.actors.agents.shell import ShellAgent
from headrace.actors.agents.simulated import SimulatedAgent
from headrace.actors.errors import ConfigError
from headrace.buffer.primitives.registry import PartRefused, Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.actors.agents.agent import Agent

    MakeAgent: TypeAlias = Callable[[AgentSection], Agent]


def make_agent(section: AgentSection) -> Agent:
    """Create the agent of a recipe. Raises ConfigError for an unknown agent, a missing program or invalid settings."""
    try:
        return AGENTS.find(section.kind)(section)
    except (AgentMissing, PartRefused) as error:
        raise ConfigError(f"agent.kind: {error}") from error


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
                    f"agent.kind: {section.kind!r} did not return an agent: {name!r} is missing (docs/extending.md)"
                )
        return agent

    return made


AGENTS: Final[Registry[MakeAgent]] = Registry(
    kind="agent",
    group="headrace.agents",
    own={
        AgentKind.SHELL: lambda section: ShellAgent(section.shell),
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
