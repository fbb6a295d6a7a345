"""What the worker asks of an agent, what an agent gets, and how it says that it ended.

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
    """Why the agent ended."""

    FINISHED = "finished"
    """It says so: a white-box agent by its last command, a program by ending without an error."""
    TURNS = "turns"
    """Every allowed turn was used."""
    CONTEXT = "context"
    """The conversation no longer fits the context budget."""
    LENGTH = "length"
    """An answer was cut, or the session's budget was spent: the cut command was not run."""
    INVALID = "invalid"
    """An answer that is no command line: empty, several lines, or a NUL character."""
    TIME = "time"
    """Whoever ran the agent stopped it because its time was over."""
    ERROR = "error"
    """The agent's program ended with an error of its own; `AgentReport.exit_code` and `result` say which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """How a rollout's agent part ended. `turns` counts answers of the policy as far as the agent tells them, `commands`
    are those that a white-box agent ran. The rest is of agents that are programs: exit code (None: none yet), last
    words (its result or error), and the end of what it printed."""

    stop: StopReason
    turns: int
    commands: tuple[str, ...] = ()
    exit_code: int | None = None
    result: str = ""
    log_tail: str = ""


class SimulatedPolicy(Protocol):
    """Simulated engines, for one run of the simulated agent."""

    @property
    def key(self) -> str:
        """Names the attempt, the same in every run: task, rollout and attempt number."""
        ...

    async def turn(self, tokens: int, seconds: float) -> None:
        """One answer of so many tokens, which takes so long to generate."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """The policy, for one run of an agent. `base_url` is the session's own (`http://host:port/s/<token>`), as this
    process reaches it; `chat` is the same as a client. `context_tokens`: prompt and answer together, None if it is not
    known."""

    base_url: str
    chat: Chat
    context_tokens: int | None = None
    simulated: SimulatedPolicy | None = None
    """Where engines are simulated: in place of the other two."""


class Agent(Protocol):
    """Works on one task; holds no state between runs; picklable."""

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        """What the agent's sandbox must show of the host. The evaluator's sandboxes show none of it."""
        ...

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """Raises what the gateway or the sandbox raises, and AgentNotStarted: the caller classifies it."""
        ...


class AgentNotStarted(Exception):
    """The agent's program is missing or could not run: nothing that the policy did. The message names the knob."""
