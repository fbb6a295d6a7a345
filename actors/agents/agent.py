"""The interface of agents: what an agent receives, how the worker runs it, and how it reports its end.

Invariants:
- An agent ends with exactly one StopReason. Failures of the gateway, the sandbox or the agent's own installation are
  raised, never turned into a reason to stop.
- What an agent prints is data: bounded, never executed or resolved as a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.actors.agents.chat import Chat
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import HostFolder, Sandbox


class StopReason(StrEnum):
    """Reason for the end of an agent."""

    FINISHED = "finished"
    """The agent finished: a white-box agent by its last command, a program by exiting without an error."""
    TURNS = "turns"
    """All allowed turns were used."""
    CONTEXT = "context"
    """The conversation no longer fits the context budget."""
    LENGTH = "length"
    """An answer was truncated, or the budget of the session was used up; the truncated command was not run."""
    INVALID = "invalid"
    """An answer was not a command line: empty, several lines, or with a NUL character."""
    TIME = "time"
    """The agent was stopped because its time was over."""
    ERROR = "error"
    """The program of the agent failed; see `AgentReport.exit_code` and `result`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """End of the agent phase of a rollout. `turns` counts answers of the policy, as far as the agent reports them;
    `commands` are those that a white-box agent ran. The other fields are for agents that are programs: exit code (None
    while running), `result` (final message or error), and the end of the output."""

    stop: StopReason
    turns: int
    commands: tuple[str, ...] = ()
    exit_code: int | None = None
    result: str = ""
    log_tail: str = ""


class SimulatedPolicy(Protocol):
    """Simulated engines, as one run of the simulated agent sees them."""

    @property
    def key(self) -> str:
        """Name of the attempt, the same in every run: task, rollout and attempt number."""
        ...

    async def turn(self, tokens: int, seconds: float) -> None:
        """Generate one answer of `tokens` tokens in `seconds` seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """The policy, as one run of an agent sees it. `base_url` is the URL of the session
    (`http://host:port/s/<token>`), reachable from this process; `chat` is a client for it. `context_tokens` limits
    prompt and answer together; None if unknown."""

    base_url: str
    chat: Chat
    context_tokens: int | None = None
    simulated: SimulatedPolicy | None = None
    """Replaces `base_url` and `chat` where engines are simulated."""


class Agent(Protocol):
    """An agent that works on one task; stateless between runs, picklable."""

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        """Folders of the host that are mounted in the sandbox of the agent, but not in those of the evaluator."""
        ...

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """Work on the task. Raises AgentNotStarted and errors of gateway and sandbox, which the caller classifies."""
        ...


class AgentNotStarted(Exception):
    """The program of the agent is missing or could not run, which is not the fault of the policy."""
