"""The config section `agent`: the kind of agent and the settings of each kind."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from headrace.actors.agents.loop.config import LoopConfig
from headrace.actors.agents.programs.claude_code import ClaudeCodeConfig
from headrace.actors.agents.programs.cli_agent import ProgramConfig
from headrace.actors.agents.programs.codex import CodexConfig
from headrace.actors.agents.programs.mini_swe_agent import MiniSweAgentConfig
from headrace.actors.agents.programs.simulated import SimulatedAgentConfig
from headrace.buffer.primitives.sections import Section


class ShellAgentConfig(Section):
    """Limits of one run of the agent."""

    max_turns: int = Field(default=3, ge=1)
    """Maximum number of policy answers, including the last one."""
    command_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline for one command; when it is exceeded, the policy reads `timeout`."""
    max_observation_bytes: int = Field(default=48, ge=1)
    """Maximum number of bytes of a command's output that the policy reads."""
    working_directory: str = "/workspace"
    """Working directory of every command; each one runs in a new shell."""


class AgentKind(StrEnum):
    """Agent that works on the tasks."""

    LOOP = "loop"
    """The loop agent: reads an action from every answer and acts in the recipe's environment."""
    SHELL = "shell"
    """The white-box shell agent: every answer of the policy is a command."""
    IMMEDIATE = "immediate"
    """Returns immediately; only for measuring the orchestration."""
    SIMULATED = "simulated"
    """Waits instead of working, usually with simulated engines; for replays and measurements."""
    CLAUDE_CODE = "claude-code"
    """Anthropic's program, which runs in the sandbox; the guide 'Agents' says how to install it and those below."""
    CODEX = "codex"
    """OpenAI's program, which runs in the sandbox."""
    MINI_SWE_AGENT = "mini-swe-agent"
    """A small Python agent with at most one tool, which runs in the sandbox."""
    QWEN_CODE = "qwen-code"
    """Qwen's program, which runs in the sandbox."""
    OPENCODE = "opencode"
    """A program that supports many model providers and runs in the sandbox."""


_WITHOUT_PROGRAM = (AgentKind.LOOP, AgentKind.SHELL, AgentKind.IMMEDIATE, AgentKind.SIMULATED)


class AgentSection(Section):
    kind: AgentKind | str = Field(default=AgentKind.SHELL, union_mode="left_to_right")
    """Agent that works on the tasks: `loop`, `shell`, `claude-code`, `codex`, `mini-swe-agent`, `qwen-code`,
    `opencode`, `simulated` (only waits), `immediate` (does nothing), or one of another package (guide 'Extending
    headrace')."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for an agent from another package."""
    turns: int = Field(default=50, ge=1)
    """Maximum number of policy answers in one session of an agent from another package."""
    loop: LoopConfig = LoopConfig()
    """Settings of the loop agent."""
    shell: ShellAgentConfig = ShellAgentConfig()
    """Settings of the shell agent."""
    program: ProgramConfig = ProgramConfig()
    """Settings shared by all agents that are programs."""
    claude_code: ClaudeCodeConfig = ClaudeCodeConfig()
    """Further settings of Claude Code."""
    codex: CodexConfig = CodexConfig()
    """Further settings of Codex."""
    mini_swe_agent: MiniSweAgentConfig = MiniSweAgentConfig()
    """Further settings of mini-swe-agent."""
    simulated: SimulatedAgentConfig = SimulatedAgentConfig()
    """Settings of the simulated agent."""

    @property
    def is_outside(self) -> bool:
        """True for an agent from another package."""
        return not isinstance(self.kind, AgentKind)

    @property
    def is_program(self) -> bool:
        """True for an agent that is a program in the sandbox; agents from other packages are assumed to run their own
        loop."""
        return not self.is_outside and self.kind not in _WITHOUT_PROGRAM

    @property
    def keeps_episodes(self) -> bool:
        """True for an agent that keeps a record of its episodes; agents from other packages are assumed to."""
        return self.is_outside or self.kind in (AgentKind.LOOP, AgentKind.SHELL)

    @property
    def max_turns(self) -> int:
        """Maximum number of policy answers in one session."""
        if self.is_outside:
            return self.turns
        if self.kind is AgentKind.SIMULATED:
            return self.simulated.turns
        if self.kind is AgentKind.LOOP:
            return self.loop.max_turns
        return self.program.max_turns if self.is_program else self.shell.max_turns
