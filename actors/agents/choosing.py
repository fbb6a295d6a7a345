"""The agent that a recipe names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.actors.agents.claude_code import ClaudeCode
from headrace.actors.agents.codex import Codex
from headrace.actors.agents.config import AgentKind
from headrace.actors.agents.immediate import ImmediateAgent
from headrace.actors.agents.installing import AgentMissing
from headrace.actors.agents.mini_swe_agent import MiniSweAgent
from headrace.actors.agents.opencode import Opencode
from headrace.actors.agents.qwen_code import QwenCode
from headrace.actors.agents.shell import ShellAgent
from headrace.actors.agents.simulated import SimulatedAgent
from headrace.actors.errors import ConfigError

if TYPE_CHECKING:
    from headrace.actors.agents.agent import Agent
    from headrace.actors.agents.config import AgentSection


def make_agent(section: AgentSection) -> Agent:
    """Raises ConfigError when its program is not installed."""
    try:
        return _make(section)
    except AgentMissing as error:
        raise ConfigError(f"agent.kind: {error}") from error


def _make(section: AgentSection) -> Agent:
    match section.kind:
        case AgentKind.SHELL:
            return ShellAgent(section.shell)
        case AgentKind.IMMEDIATE:
            return ImmediateAgent()
        case AgentKind.SIMULATED:
            return SimulatedAgent(section.simulated)
        case AgentKind.CLAUDE_CODE:
            return ClaudeCode(section.program, section.claude_code)
        case AgentKind.CODEX:
            return Codex(section.program, section.codex)
        case AgentKind.MINI_SWE_AGENT:
            return MiniSweAgent(section.program, section.mini_swe_agent)
        case AgentKind.QWEN_CODE:
            return QwenCode(section.program)
        case AgentKind.OPENCODE:
            return Opencode(section.program)
