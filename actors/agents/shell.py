"""The white-box shell agent, which runs each of the policy's answers as one command line in the sandbox.

Invariants:
- The policy's text is run unchanged or not at all; its output (capped) is the next message.
- Messages only grow, so every prompt extends the one before it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from opentelemetry import trace
from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.agents.agent import AgentReport, AgentSession, StopReason
from headrace.actors.chat import ChatContextExceeded, ChatMessage, ChatReply
from headrace.sandboxes.errors import ExecTimeout
from headrace.serve.observing import span_names

if TYPE_CHECKING:
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import ExecResult, HostFolder, Sandbox

tracer = trace.get_tracer("headrace.actors.agents.shell")

TIMEOUT_OBSERVATION = "timeout"
_ENDS_WITH_EXIT = re.compile(r"(?:^|[;&|\s])exit\s*$")


class ShellAgentConfig(BaseModel):
    """Limits of one run of the agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=3, ge=1)
    """Maximum number of policy answers, including the last one."""
    command_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline for one command; when it is exceeded, the policy reads `timeout`."""
    max_observation_bytes: int = Field(default=48, ge=1)
    """Maximum number of bytes of a command's output that the policy reads; small, since the tiny policy has a short
    context."""
    working_directory: str = "/workspace"
    """Working directory of every command; each one runs in a new shell."""


class ShellAgent:
    """Agent that runs each answer as a command. Stateless between runs."""

    def __init__(self, config: ShellAgentConfig) -> None:
        self._config = config

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """Ask the policy for a command, run it and show the policy the output, until the policy exits or a limit is
        reached.

        Raises:
            ChatFailed: the gateway failed or refused the request.
            SandboxError: the sandbox died; a command's own timeout is an observation instead.
        """
        messages = [ChatMessage(role="user", content=task.instruction)]
        commands: list[str] = []
        for turn in range(1, self._config.max_turns + 1):
            try:
                reply = await session.chat(messages)
            except ChatContextExceeded:
                return AgentReport(stop=StopReason.CONTEXT, turns=turn - 1, commands=tuple(commands))
            refusal = unusable(reply)
            if refusal is not None:
                return AgentReport(stop=refusal, turns=turn, commands=tuple(commands))
            with tracer.start_as_current_span(span_names.TOOL):
                try:
                    result = await sandbox.exec(
                        reply.text,
                        cwd=self._config.working_directory,
                        timeout_s=self._config.command_timeout_s,
                        max_output_bytes=self._config.max_observation_bytes,
                    )
                    observation = observation_of(result, self._config.max_observation_bytes)
                except ExecTimeout:
                    observation = TIMEOUT_OBSERVATION
            commands.append(reply.text)
            if ends_session(reply.text):
                return AgentReport(stop=StopReason.FINISHED, turns=turn, commands=tuple(commands))
            messages.append(ChatMessage(role="assistant", content=reply.text))
            messages.append(ChatMessage(role="user", content=observation))
        return AgentReport(stop=StopReason.TURNS, turns=self._config.max_turns, commands=tuple(commands))


def unusable(reply: ChatReply) -> StopReason | None:
    """Return the stop reason for an answer that cannot be run, or None if it can be."""
    if reply.finish_reason == "length":
        return StopReason.LENGTH
    if not reply.text.strip() or "\n" in reply.text or "\0" in reply.text:
        return StopReason.INVALID
    return None


def ends_session(command: str) -> bool:
    """Return True if the last word of the command line is `exit`."""
    return _ENDS_WITH_EXIT.search(command) is not None


def observation_of(result: ExecResult, max_bytes: int) -> str:
    """Return the first `max_bytes` of standard output and standard error, without trailing newlines."""
    return (result.stdout + result.stderr)[:max_bytes].decode(errors="replace").rstrip("\n")
